"""Processes of a run: launcher, fork server, and one harness for each rank."""
