"""View of a search: its rungs, and the trials that are evaluated at them."""
