"""Tensor parallelism: matrices sharded over ranks, and the communication between them."""
