"""Limits for idle and slow connections."""

import asyncio
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from tests.client.helpers import make_spec
from tests.server.helpers import metrics
from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, until
from zerolab.client.http import Client
from zerolab.reports.metrics_file import MetricsFile
from zeroserver.access.connection_timeouts import ConnectionLimits
from zeroserver.api.runs import Empty, FastRoutes, WireRoute
from zeroserver.app import create_app
from zeroserver.extensions.metrics_export.router import _Turns
from zeroserver.process import serving
from zeroserver.services import Services
from zeroserver.settings import Settings

HALF = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-More: "
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
UNWANTED = (
    b"POST /api/v1/experiments HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\nx"
)


class Listening:
    """A server on a port, in a thread of this process."""

    def __init__(self, services: Services, port: int) -> None:
        self.services = services
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def connect(self, say: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)
        with suppress(ConnectionError):  # it may be closed before anything is sent
            connection.sendall(say)
        return connection


@contextmanager
def listening(home: Path, limits: ConnectionLimits) -> Iterator[Listening]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(Settings(home=home))
        config = serving(app, limits)
        config.timeout_keep_alive = int(DEADLINE_S)  # a slow test is no idle client
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until("the server listens", lambda: server.started)
        try:
            yield Listening(app.state.services, listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)


def is_closed(connection: socket.socket) -> bool:
    """Return true if the peer has closed the connection and all data was read."""
    connection.settimeout(0.01)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def send_until_closed(connection: socket.socket) -> Callable[[], bool]:
    """Return a probe that sends one byte and returns true when the connection is closed."""

    def look() -> bool:
        try:
            connection.sendall(b"x")
        except OSError:
            return True
        return is_closed(connection)

    return look


@pytest.mark.parametrize("data", [b"", HALF, WHOLE + HALF, UNWANTED])
def test_incomplete_request_times_out(tmp_path: Path, data: bytes) -> None:
    limits = ConnectionLimits(header_s=0.2)
    with listening(tmp_path / "home", limits) as server, server.connect(data) as connection:
        until("it is closed", lambda: is_closed(connection))
        assert limits.closed == 1


@pytest.mark.parametrize("data", [HALF, UNWANTED])
def test_slow_bytes_do_not_extend_timeout(tmp_path: Path, data: bytes) -> None:
    with (
        listening(tmp_path / "home", ConnectionLimits(header_s=0.2)) as server,
        server.connect(data) as connection,
    ):
        until("it is closed", send_until_closed(connection))


def test_small_response_is_one_packet(tmp_path: Path) -> None:
    with (
        listening(tmp_path / "home", ConnectionLimits()) as server,
        server.connect(WHOLE) as connection,
    ):
        header, _, body = connection.recv(65536).partition(b"\r\n\r\n")
        assert header.startswith(b"HTTP/1.1 200 OK")
        assert b"content-length: %d\r\n" % len(body) in header


def test_unexpected_error_of_wire_route(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_request: Request) -> Response:
        raise RuntimeError("broken")

    app = FastRoutes(Router(), [WireRoute("POST", "/runs/{run_id}/fail", fail, Empty)])

    async def request() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client:
            return await client.post("http://server/api/v1/runs/1/fail")

    response = asyncio.run(request())
    assert (response.status_code, response.json()["error"]["type"]) == (500, "internal")
    assert "POST /api/v1/runs/1/fail failed" in caplog.text


def test_endless_header_is_rejected(tmp_path: Path) -> None:
    with (
        listening(tmp_path / "home", ConnectionLimits(header_s=DEADLINE_S)) as server,
        server.connect(HALF) as connection,
        pytest.raises(ConnectionError),
    ):
        connection.sendall(b"x" * 100_000_000)


def test_idle_connections_are_closed_for_new_ones(tmp_path: Path) -> None:
    limits = ConnectionLimits(header_s=DEADLINE_S, max_per_peer=20)
    with listening(tmp_path / "home", limits) as server:
        silent = [server.connect(HALF) for _ in range(30)]
        until(
            "the oldest have gone", lambda: all(is_closed(connection) for connection in silent[:10])
        )
        for _ in range(3):
            assert httpx.get(f"{server.url}/healthz", timeout=DEADLINE_S).status_code == 200
        assert not is_closed(silent[-1])
        for connection in silent:
            connection.close()


def test_reused_connection_stays_open(tmp_path: Path) -> None:
    limits = ConnectionLimits(header_s=DEADLINE_S)
    with listening(tmp_path / "home", limits) as server, server.connect(WHOLE) as used:
        until("it is answered", lambda: used.recv(65536))
        limits.header_s = 0.2
        with server.connect(HALF) as silent:
            until("a silent one is closed meanwhile", lambda: is_closed(silent))
        used.sendall(WHOLE)
        until("it is answered again", lambda: used.recv(65536))
        assert limits.closed == 1


@pytest.mark.slow
def test_unread_export_ends(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", make_spec(tmp_path))
    for step in range(60_000):
        file.append(file.encode(metrics("training", step, loss=0.5)))
    file.close()
    limits = ConnectionLimits(stalled_s=0.2)
    with listening(tmp_path / "home", limits) as server:
        token = server.services.keys.token
        with Client(server.url, token) as client:
            client.import_metrics((tmp_path / "metrics.jsonl").read_bytes())
        request = (
            "GET /api/v1/experiments/1/metrics/export HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {token}\r\n\r\n"
        )
        readers = [server.connect(request.encode()) for _ in range(16)]
        until("all have been cut off", lambda: limits.closed == 16)
        until("their turns are free", lambda: not server.services.part(_Turns).locked())
        limits.stalled_s = DEADLINE_S  # this client reads slowly
        with Client(server.url, token) as client:
            exported = b"".join(client.export_metrics(1))
        assert len(exported.splitlines()) == 60_000
        for reader in readers:
            reader.close()


@pytest.mark.processes
def test_server_raises_file_limit(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "home")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))  # inherited
        server.start()
        process = server._process
        assert process is not None
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft >= min(hard, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        server.close()
