"""Checkpoints that any stage and any number of ranks can load."""
