"""Stages 0, 1 and 2: flat buckets of parameters and gradients."""
