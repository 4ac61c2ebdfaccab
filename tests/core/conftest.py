"""A real server for each test."""

from tests.faults.fixtures import client, nursery, server

__all__ = ["client", "nursery", "server"]
