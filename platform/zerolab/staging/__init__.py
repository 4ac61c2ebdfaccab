"""Data of an experiment, copied to a place of the node before the ranks of a trial start."""
