"""Closing the database while reads run, and connections that are refused."""

import gc
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.server.conftest import new_database
from zerolab.errors import ConflictError
from zeroserver.errors import StoreError
from zeroserver.store.database import Database


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return new_database(request.getfixturevalue("postgresql"))
    return f"sqlite:///{tmp_path}/zerolab.db"


def test_read_that_outlasts_the_database_leaves_no_connection(url: str) -> None:
    """Collected open connections are errors: pytest turns their warnings into failures."""
    _close_during_read(Database(url, lambda _changes: None))
    gc.collect()


def _close_during_read(database: Database) -> None:
    began, closed = threading.Event(), threading.Event()
    rows: list[Any] = []

    def read() -> None:
        with database.read() as connection:
            began.set()
            closed.wait()
            rows.extend(connection.execute(text("SELECT 1")).fetchall())

    reader = threading.Thread(target=read)
    reader.start()
    began.wait()
    database.close()
    closed.set()
    reader.join()
    assert rows == [(1,)]
    with pytest.raises(StoreError, match="the server is stopping"), database.read():
        pass


@pytest.mark.processes
def test_refused_lock_leaves_no_connection(
    postgresql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroserver.store.lock._WAIT_S", 0.0)
    url = new_database(postgresql)
    with ExitStack() as stack:
        first, second = (Database(url, lambda _changes: None) for _ in range(2))
        stack.callback(first.close)
        stack.callback(second.close)
        first.lock.acquire()
        with pytest.raises(ConflictError, match="another server already works"):
            second.lock.acquire()
    del first, second, stack
    gc.collect()
