"""A real server for each test that asks for one."""

from tests.faults.fixtures import client, nursery, server

__all__ = ["client", "nursery", "server"]
