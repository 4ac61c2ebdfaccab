"""Requests and connections that pass through the server to the port of a task.

Bodies are streamed in both directions. httpcore speaks HTTP over the tunnels; after an upgrade, for
WebSockets and ssh, bytes are passed on unread.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from zerolab.errors import ConfigError
from zeroserver.access.task_hosts import TASK
from zeroserver.access.upgrades import ByteStream, Upgrade, upgrade_of
from zeroserver.extensions.interactive.endpoints import Endpoint

if TYPE_CHECKING:
    import httpcore

__all__ = ["forward_request", "tunnel_response", "waiting_page"]

_TUNNEL_WAIT_S = 10.0
_READ_S = 600.0
"""Maximum time without data from the task within a response."""
_WRITE_S = 60.0
_MAX_CONNECTIONS = 100
"""Maximum number of simultaneous requests and WebSockets of a task."""
_CONTROL_BYTES = 131
"""Maximum size of a WebSocket ping or pong, which does not count as use."""
_CHECK_S = 5.0
"""Interval of checks that the caller of an open connection still has access."""
_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
_FORWARDED = re.compile(rb"forwarded|x-forwarded-.*|x-real-ip")
_CREDENTIALS = frozenset({b"authorization", b"cookie"})
_SECURITY = (
    (b"content-security-policy", b"frame-ancestors 'self'"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Added to every response: other origins must not embed the pages of a task."""
_UNLESS_SET = ((b"x-frame-options", b"SAMEORIGIN"), (b"referrer-policy", b"same-origin"))
_SANDBOX = (b"content-security-policy", b"sandbox")
"""For responses at the host name of the server itself, to programs."""

Headers = list[tuple[bytes, bytes]]


def waiting_page(text: str) -> Response:
    """Return a page that reloads until the task can be used."""
    refresh = '<meta http-equiv="refresh" content="2">'
    page = f"<!doctype html><meta charset=utf-8>{refresh}<title>Zerolab</title><p>{text}"
    return HTMLResponse(page, 503, {"Retry-After": "2"})


def tunnel_response(upgrade: Upgrade, endpoint: Endpoint) -> Response:
    """Return the response that turns a connection of a task into a waiting tunnel."""

    async def park() -> None:
        endpoint.add_tunnel(upgrade([(b"upgrade", b"tcp")]))

    return _Upgraded(park)


async def forward_request(
    request: Request, endpoint: Endpoint, cookie_names: Iterable[str]
) -> Response:
    """Send a request to the port of a task and return its response.

    Args:
        request: The request; its path is below the task.
        endpoint: The task.
        cookie_names: Our cookies, which the task must neither see nor set.
    """
    import httpcore

    endpoint.touch()
    upgrade = upgrade_of(request.scope)
    is_current: Callable[[], bool] = request.scope["state"]["is_current"]
    headers = dict(request.scope["headers"])
    if upgrade is not None and headers.get(b"upgrade", b"").lower() == b"tcp":
        return await _connect(upgrade, endpoint, is_current)
    if endpoint.pool is None:
        endpoint.pool = httpcore.AsyncConnectionPool(
            max_connections=_MAX_CONNECTIONS,
            keepalive_expiry=30.0,
            network_backend=_backend(endpoint),
        )
    sent = httpcore.Request(
        request.method,
        httpcore.URL(scheme=b"http", host=b"task", port=80, target=_target(request.scope)),
        headers=_request_headers(request.scope, cookie_names, upgrading=upgrade is not None),
        content=request.stream(),
        extensions={
            "timeout": {
                "connect": _TUNNEL_WAIT_S, "pool": _TUNNEL_WAIT_S,
                "read": _READ_S, "write": _WRITE_S,
            }
        },
    )  # fmt: skip
    try:
        response = await endpoint.pool.handle_async_request(sent)
    except (httpcore.ConnectTimeout, httpcore.PoolTimeout, httpcore.ConnectError):
        return waiting_page("The task does not respond yet. This page reloads.")
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
        return HTMLResponse("<p>The program of the task closed the connection.", 502)
    if response.status == 101 and upgrade is not None:
        return _switch(upgrade, response, endpoint, is_current)
    return _streamed(response, endpoint, request.scope, cookie_names)


async def _connect(
    upgrade: Upgrade, endpoint: Endpoint, is_current: Callable[[], bool]
) -> Response:
    """Connect a client to the port of a task without HTTP."""
    try:
        tunnel = await endpoint.take_tunnel(_TUNNEL_WAIT_S)
    except TimeoutError:
        return waiting_page("The task does not respond yet.")

    async def relay() -> None:
        client = upgrade([(b"upgrade", b"tcp")])
        await _relay(client, _Tunnel(tunnel), endpoint, is_current, is_websocket=False)

    return _Upgraded(relay)


def _switch(
    upgrade: Upgrade,
    response: "httpcore.Response",
    endpoint: Endpoint,
    is_current: Callable[[], bool],
) -> Response:
    """Connect a client to a task that has accepted its upgrade."""
    headers = [(name, value) for name, value in response.headers if name.lower() != b"connection"]
    headers = [item for item in headers if item[0].lower() != b"set-cookie"]

    async def relay() -> None:
        try:
            client = upgrade(headers)
            stream = response.extensions["network_stream"]
            await _relay(client, stream, endpoint, is_current, is_websocket=True)
        finally:
            await response.aclose()

    return _Upgraded(relay)


class _Upgraded(Response):
    """Response that takes over the connection instead of sending anything."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run()
        except ConnectionError:
            return  # the client has gone


async def _relay(
    client: ByteStream,
    task: Any,
    endpoint: Endpoint,
    is_current: Callable[[], bool],
    *,
    is_websocket: bool,
) -> None:
    """Pass bytes on in both directions until a side closes, or the caller loses the access."""
    import httpcore

    def count(data: bytes) -> None:
        if not (is_websocket and len(data) <= _CONTROL_BYTES and data[0] & 0x0F in (9, 10)):
            endpoint.touch()

    async def upload() -> None:
        while data := await client.read():
            count(data)
            await task.write(data)

    async def download() -> None:
        while data := await task.read(64 * 1024, None):
            count(data)
            await client.write(data)

    async def check() -> None:
        while is_current():
            await asyncio.sleep(_CHECK_S)

    directions = [asyncio.create_task(part()) for part in (upload, download, check)]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        results = await asyncio.gather(*directions, return_exceptions=True)
        client.close()
        await task.aclose()
    expected = (ConnectionError, httpcore.NetworkError, asyncio.CancelledError, type(None))
    for result in results:
        if not isinstance(result, expected):
            raise result


def _streamed(
    response: "httpcore.Response", endpoint: Endpoint, scope: Scope, cookie_names: Iterable[str]
) -> Response:
    import httpcore

    async def body() -> AsyncIterator[bytes]:
        try:
            async for part in response.aiter_stream():
                endpoint.touch()
                yield part
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise ConnectionResetError from error  # the client must not take it for complete
        finally:
            await response.aclose()

    answer = _Streamed(body(), response.status)
    answer.raw_headers = _response_headers(response.headers, scope, cookie_names)
    return answer


class _Streamed(StreamingResponse):
    """Response of a task that closes the connection if the task breaks off."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except* ConnectionResetError:
            pass  # uvicorn closes the connection of an incomplete response


def _target(scope: Scope) -> bytes:
    """Return the path and query behind the prefix of the task, as the client has sent them.

    Raises:
        ConfigError: If the slashes of the prefix are encoded.
    """
    raw: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    parts = raw.split(b"/", 3)
    if len(parts) < 4:
        raise ConfigError("request", ["path: must be /proxy/TASK/PATH, got encoded slashes"])
    path = b"/" + parts[3]
    return path + b"?" + query if query else path


def _request_headers(scope: Scope, cookie_names: Iterable[str], *, upgrading: bool) -> Headers:
    received: Headers = scope["headers"]
    dropped = _HOP_BY_HOP | _listed(received)
    if TASK not in scope:
        dropped |= _CREDENTIALS
    headers: Headers = []
    for name, value in received:
        if name in dropped or _FORWARDED.fullmatch(name):
            continue
        if name == b"cookie":
            kept = _without_cookies(value, cookie_names)
            if kept:
                headers.append((name, kept))
            continue
        headers.append((name, value))
    fields = dict(received)
    if b"transfer-encoding" in fields and b"content-length" not in fields:
        headers.append((b"transfer-encoding", b"chunked"))
    if upgrading:
        headers += [(b"connection", b"upgrade"), (b"upgrade", fields[b"upgrade"])]
    headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
    headers.append((b"x-forwarded-host", fields[b"host"]))
    return headers


def _response_headers(
    received: Sequence[tuple[bytes, bytes]], scope: Scope, cookie_names: Iterable[str]
) -> Headers:
    headers: Headers = [(name.lower(), value) for name, value in received]
    dropped = _HOP_BY_HOP | _listed(headers) | {b"date"}  # the server adds its own
    headers = [
        (name, value)
        for name, value in headers
        if name not in dropped
        and (name != b"set-cookie" or (TASK in scope and _may_set(value, cookie_names)))
    ]
    names = {name for name, _ in headers}
    headers += _SECURITY
    headers += [item for item in _UNLESS_SET if item[0] not in names]
    if TASK not in scope:
        headers.append(_SANDBOX)
    return headers


def _listed(headers: Headers) -> set[bytes]:
    """Return the names in the ``Connection`` header, which are meant for the next hop only."""
    values = (value for name, value in headers if name == b"connection")
    return {name.strip().lower() for value in values for name in value.split(b",")}


def _without_cookies(value: bytes, names: Iterable[str]) -> bytes:
    parts = [part.strip() for part in value.split(b";")]
    ours = {name.encode() for name in names}
    return b"; ".join(part for part in parts if part and part.partition(b"=")[0] not in ours)


def _may_set(value: bytes, names: Iterable[str]) -> bool:
    """Check that a task's cookie is not one of ours, and is for its host only."""
    try:
        cookies = SimpleCookie(value.decode("latin-1"))
    except CookieError:
        return False
    ours = set(names)
    return all(name not in ours and not item["domain"] for name, item in cookies.items())


def _backend(endpoint: Endpoint) -> Any:
    """Return what httpcore opens connections with: the tunnels of a task."""
    import httpcore

    class Backend(httpcore.AsyncNetworkBackend):
        """Tunnels of a task as connections."""

        # Of the options only the timeout applies.
        async def connect_tcp(  # type: ignore[override]
            self, host: str, port: int, timeout: float | None = None, **_: Any
        ) -> Any:
            """Take a tunnel."""
            try:
                return _Tunnel(await endpoint.take_tunnel(timeout))
            except TimeoutError as error:
                raise httpcore.ConnectTimeout from error

    return Backend()


class _Tunnel:
    """Tunnel with the methods of ``httpcore.AsyncNetworkStream``."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._rest = b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read at most ``max_bytes``."""
        import httpcore

        if not self._rest:
            try:
                self._rest = await asyncio.wait_for(self._stream.read(), timeout)
            except TimeoutError as error:
                raise httpcore.ReadTimeout from error
        data, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all of the buffer."""
        import httpcore

        try:
            await asyncio.wait_for(self._stream.write(buffer), timeout)
        except TimeoutError as error:
            raise httpcore.WriteTimeout from error
        except ConnectionError as error:
            raise httpcore.WriteError from error

    async def aclose(self) -> None:
        """Close the tunnel."""
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        """Return whether an idle connection was closed; nothing else is known."""
        return self._stream.closed if info == "is_readable" else None
