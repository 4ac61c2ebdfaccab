"""Agents, jobs and pools: registration, scheduler input and reasons to wait."""
