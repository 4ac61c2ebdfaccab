"""Daemon of a machine with slots: it executes runs of the server."""
