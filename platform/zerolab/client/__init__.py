"""Talking to a server: requests, reports of a run, and the archive of a model directory."""

from zerolab.client.http import Client

__all__ = ["Client"]
