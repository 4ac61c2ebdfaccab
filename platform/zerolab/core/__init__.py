"""Core API: metrics, checkpoints, preemption and ranks for any script, with or without a server."""
