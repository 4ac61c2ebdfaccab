"""Batches: the loader, the samplers, how far they are, and where their tensors go."""
