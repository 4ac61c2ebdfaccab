"""Tensor parallelism: matrices cut over ranks, and what moves between the parts."""
