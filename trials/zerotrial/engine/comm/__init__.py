"""Collectives of the engine: torch's backends, and a watchdog."""
