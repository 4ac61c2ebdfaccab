"""View of a search: its rungs and the trials evaluated at them."""
