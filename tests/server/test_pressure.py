"""Requests succeed while the database is locked or other clients do not read."""

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.server.helpers import Server, training
from tests.waiting import DEADLINE_S, until
from zeroserver.extensions.metrics_export.router import _Turns
from zeroserver.store import database

WRITERS = 45
"""More than the server has threads."""


@contextmanager
def locked(server: Server) -> Iterator[None]:
    """Hold another process's lock on the database, which blocks all changes."""
    if server.services.database.sqlite:
        holder: Any = sqlite3.connect(
            server.services.orchestrator.home.database, isolation_level=None
        )
        holder.execute("BEGIN IMMEDIATE")
    else:
        url = server.services.settings.database_url
        holder = psycopg.connect(url)
        holder.execute("LOCK TABLE experiments IN EXCLUSIVE MODE")
    try:
        yield
    finally:
        holder.rollback()
        holder.close()


@pytest.mark.slow
def test_locked_database_blocks_no_reader(server: Server) -> None:
    server.submit()
    before = server.services.database.jobs

    def rename() -> Any:
        return server.http.patch("/api/v1/experiments/1", json={"name": "new"})

    with ThreadPoolExecutor(WRITERS) as pool:
        with locked(server):
            responses = [pool.submit(rename) for _ in range(WRITERS)]
            until("changes wait", lambda: server.services.database.waiting or before)
            for path in ("/api/v1/experiments", "/api/v1/agents", "/metrics"):
                get = partial(server.http.get, path)
                until(f"{path} answers", get, lambda response: response.status_code == 200)
            refused = [response.result() for response in responses]
            stalled = until("it is ill", partial(server.http.get, "/healthz"), _is_stalled)
            assert "the database has stored nothing for" in stalled.json()["error"]["message"]
        assert {response.status_code for response in refused} == {503}
        assert {response.headers["Retry-After"] for response in refused} == {"2"}
        assert "the database has been busy for 10 s; try again" in refused[0].text
        assert server.experiment()["name"] == "digits"
        again = [pool.submit(until, "it is made", rename, _is_made) for _ in range(WRITERS)]
        assert {response.result().status_code for response in again} == {200}
    assert server.experiment()["name"] == "new"
    healthy = partial(server.http.get, "/healthz")
    until("it is healthy", healthy, lambda response: response.status_code == 200)


def _is_stalled(response: Any) -> bool:
    return bool(response.status_code == 503)


def _is_made(response: Any) -> bool:
    return bool(response.status_code == 200)


def test_rejected_change_is_never_applied(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = sqlite_server
    server.submit()
    with ThreadPoolExecutor() as pool, server.writer_held():
        path = "/api/v1/experiments/1"
        monkeypatch.setattr(database, "_START_TIMEOUT_S", 0.2)
        refused = pool.submit(server.http.patch, path, json={"name": "too late"}).result()
        monkeypatch.setattr(database, "_START_TIMEOUT_S", DEADLINE_S)
        behind = pool.submit(server.http.patch, path, json={"notes": "in time"})
        until("the next change waits", lambda: server.services.database.waiting == 2)
        healthy = partial(server.http.get, "/healthz")
        until("it is healthy", healthy, lambda response: response.status_code == 200)
        assert server.services.database.waiting == 3  # the running one included
    assert (refused.status_code, behind.result().status_code) == (503, 200)
    assert (server.experiment()["name"], server.experiment()["notes"]) == ("digits", "in time")


@pytest.mark.slow
def test_readers_over_pool_size_get_retry_after(server: Server) -> None:
    pool: Any = server.services.database._readers.pool
    with ExitStack() as connections:
        for _ in range(pool.size() + pool._max_overflow):
            connections.enter_context(server.services.database.read())
        response = server.http.get("/api/v1/experiments")
        assert (response.status_code, response.headers["Retry-After"]) == (503, "2")
        assert server.http.get("/healthz").status_code == 200
    assert server.http.get("/api/v1/experiments").status_code == 200


def test_unread_exports_hold_no_connection(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.report(spec.run_id, *(training(step, 0.5) for step in range(1, 4)))
    pool: Any = server.services.database._readers.pool
    export = server.services.part(_Turns)
    release = threading.Event()
    with ThreadPoolExecutor(30) as readers:
        stalled = [readers.submit(_read_nothing, server, release) for _ in range(30)]
        until("as many as may are on their way", export.locked)
        until("the others are refused", lambda: sum(reader.done() for reader in stalled) == 14)
        until("no connection is held", lambda: pool.checkedout() == 0)
        for path in ("/healthz", "/api/v1/experiments", "/api/v1/trials/1/metrics"):
            assert server.http.get(path).status_code == 200
        response = server.http.get("/api/v1/experiments/1/metrics/export")
        assert (response.status_code, response.headers["Retry-After"]) == (429, "5")
        release.set()
        statuses = [reader.result() for reader in stalled]
    assert sorted(statuses) == [200] * 16 + [429] * 14
    assert len(server.http.get("/api/v1/experiments/1/metrics/export").text.splitlines()) == 3


def _read_nothing(server: Server, release: threading.Event) -> int:
    """Request an export as a client that reads nothing until it is released."""
    status = 0

    async def ask() -> None:
        async def receive() -> dict[str, Any]:
            await _wait(release)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            if status == 200:
                await _wait(release)

        headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {server.token}".encode())]
        path = "/api/v1/experiments/1/metrics/export"
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": headers, "http_version": "1.1", "root_path": "",
            "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
            "state": {},
        }  # fmt: skip
        await server.app(scope, receive, send)

    portal = server.http.portal
    assert portal is not None
    portal.call(ask)
    return status


async def _wait(release: threading.Event) -> None:
    import anyio

    while not release.is_set():
        await anyio.sleep(0.01)


@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_paged_export_has_every_point_once(sqlite_server: Server, form: str) -> None:
    server = sqlite_server
    searcher = {"name": "random", "metric": "loss", "max_trials": 3, "max_length": 100}
    server.submit(searcher=searcher)
    server.add_agent(slots=3)
    expected = set()
    for trial_id in (1, 2, 3):
        spec = server.begin(trial_id)
        steps = range(1, 20_000 * trial_id // 2 + 1)
        server.send(spec.run_id, 1, [training(step, step / 2) for step in steps])
        expected |= {(trial_id, step) for step in steps}
    path = "/api/v1/experiments/1/metrics/export"
    lines = server.http.get(path, params={"format": form}).text.splitlines()
    assert len(lines) == len(expected) + (form == "csv")
    assert len(set(lines)) == len(lines)
