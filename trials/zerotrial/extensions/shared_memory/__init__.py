"""Collectives of CPU ranks of one host through shared memory, faster than gloo."""
