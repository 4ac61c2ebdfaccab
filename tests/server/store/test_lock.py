"""Database lock: a second server is rejected, a replaced server stops."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.server.conftest import new_database
from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.processes

_SESSIONS = (
    "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'zerolab %' "
    "AND datname = current_database()"
)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts servers; they are stopped after the test."""
    started: list[LiveServer] = []

    def make(name: str, *arguments: str) -> LiveServer:
        (tmp_path / name).mkdir(exist_ok=True)
        started.append(LiveServer(tmp_path / name, *arguments))
        return started[-1]

    yield make
    for server in started:
        server.close()


def assert_refused(server: LiveServer) -> None:
    arguments = ("--port", "0", *server._arguments)
    assert server.spawn(*arguments).wait(DEADLINE_S) == 2
    output = server.log.read_text()
    assert "another server already works on the database" in output
    assert "Traceback" not in output


def cut_sessions(url: str) -> None:
    """Let PostgreSQL close the connections that hold locks, and wait for it."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_SESSIONS.replace("SELECT pid", "SELECT pg_terminate_backend(pid)"))
        until("they are gone", lambda: not connection.execute(_SESSIONS).fetchall())


def process_of(server: LiveServer) -> Any:
    assert server._process is not None
    return server._process


def test_second_server_is_rejected_without_lock_file(servers: Any) -> None:
    first = servers("home")
    first.start()
    (first.home / "server.lock").unlink()
    assert_refused(first)
    assert first.client().info()["version"]


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_second_server_is_rejected_on_linked_file(servers: Any, tmp_path: Path, link: Any) -> None:
    first = servers("home")
    first.start()
    link(first.home / "zerolab.db", tmp_path / "link.db")
    assert_refused(servers("other", "--database", f"sqlite:///{tmp_path}/link.db"))


def test_lock_ends_with_killed_server(servers: Any) -> None:
    first = servers("home")
    first.start()
    first.kill()
    first.start()
    assert first.stop() == 0


def test_second_server_is_rejected_on_postgresql(servers: Any, postgresql: Any) -> None:
    url = new_database(postgresql)
    first = servers("first", "--database", url)
    first.start()
    assert_refused(servers("second", "--database", url))
    first.kill()
    second = servers("third", "--database", url)
    second.start()


def test_server_takes_lock_again_after_lost_connection(servers: Any, postgresql: Any) -> None:
    url = new_database(postgresql)
    server = servers("home", "--database", url)
    server.start()
    cut_sessions(url)
    with psycopg.connect(url, autocommit=True) as connection:
        until("the lock is taken again", lambda: connection.execute(_SESSIONS).fetchall())
    assert_refused(servers("second", "--database", url))
    assert server.stop() == 0


@pytest.mark.parametrize("stays", [True, False], ids=["running", "stopped"])
def test_replaced_server_stops(servers: Any, postgresql: Any, stays: bool) -> None:
    """The first server loses its connection and is suspended while a second one starts."""
    url = new_database(postgresql)
    first, second = servers("first", "--database", url), servers("second", "--database", url)
    first.start()
    process_of(first).send_signal(signal.SIGSTOP)
    cut_sessions(url)
    second.start()
    if not stays:
        assert second.stop() == 0
    process_of(first).send_signal(signal.SIGCONT)
    assert process_of(first).wait(DEADLINE_S) == 2
    assert "another server has taken over the database" in first.log.read_text()
    if stays:
        assert second.client().info()["version"]
