"""Removal of checkpoints or their files by users, and changes of retention policies."""
