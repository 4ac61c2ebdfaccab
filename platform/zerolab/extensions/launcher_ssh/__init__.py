"""Runs on the machines of a hostfile: a coordinator, and a worker on every machine."""
