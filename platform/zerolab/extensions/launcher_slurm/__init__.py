"""Runs as jobs of Slurm: submission, supervision and outcome."""
