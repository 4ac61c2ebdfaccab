"""Proof on one GPU: correctness, speed, memory and overlap, in one short script."""
