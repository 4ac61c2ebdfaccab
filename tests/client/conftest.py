"""A real server for each test."""

from tests.faults.fixtures import client, fork_server, server

__all__ = ["client", "fork_server", "server"]
