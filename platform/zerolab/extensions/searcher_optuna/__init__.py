"""Searches with samplers and pruners of the library Optuna."""
