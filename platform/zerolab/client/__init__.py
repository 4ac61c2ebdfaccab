"""Client of a server: requests, reports of a run, archives of model directories."""

from zerolab.client.http import Client

__all__ = ["Client"]
