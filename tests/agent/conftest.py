"""Fixture: a real server per test."""

from tests.faults.fixtures import client, fork_server, server

__all__ = ["client", "fork_server", "server"]
