"""A real server for each test that asks for one."""

from tests.faults.fixtures import client, fork_server, server

__all__ = ["client", "fork_server", "server"]
