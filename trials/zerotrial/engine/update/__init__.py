"""Optimizer step: optimizers, and the memory of their states and master weights."""
