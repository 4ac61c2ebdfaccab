"""Runs as jobs of Slurm: submitted, followed, told to leave, and ended by one rule."""
