"""Staging: copies an experiment's data to the node before a trial's ranks start."""
