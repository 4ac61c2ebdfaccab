"""Collectives of the engine: torch's backends, shared memory on one host, and a watchdog."""
