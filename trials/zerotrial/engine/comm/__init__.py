"""Collectives of the engine: torch's backends, and a record of calls."""
