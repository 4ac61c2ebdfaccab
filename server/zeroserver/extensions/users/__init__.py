"""Users of an installation, their roles and their API tokens."""
