"""Launchers, which start and supervise the processes of a run."""
