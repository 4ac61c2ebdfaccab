"""Sequence parallelism: tokens of one sample divided over ranks, and Ulysses attention."""
