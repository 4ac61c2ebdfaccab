"""Agents, jobs and pools: scheduler input, queue settings and elastic growth."""
