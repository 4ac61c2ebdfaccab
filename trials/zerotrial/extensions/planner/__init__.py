"""Planner: memory of each rank at every ZeRO stage and offload."""
