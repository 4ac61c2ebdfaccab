"""Tunnels through the server: connections that leave HTTP with ``Upgrade: tcp``.

The process of a task opens tunnels to the server, which therefore needs no way to its machine. A
client, such as ssh, opens one at the path of the task.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from zerolab.client.httpx_import import httpx
from zerolab.client.transport import certificates, is_loopback
from zerolab.errors import ForbiddenError, UnreachableError, ZerolabError

__all__ = ["LocalStream", "Stream", "open_http", "open_tunnel", "relay"]

_CONNECT_S = 10.0
_KEEPALIVE_S = 30
"""Seconds between probes of a connection without data, so that routers do not forget it."""
_CHUNK_BYTES = 64 * 1024


class Stream(Protocol):
    """One end of a connection."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Wait for data; empty after the end of the connection."""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all data."""

    async def aclose(self) -> None:
        """Close the connection."""


class LocalStream:
    """Connection of asyncio as a :class:`Stream`.

    Args:
        reader: Its incoming data.
        writer: Its outgoing data.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Wait for data; empty after the end of the connection."""
        return await asyncio.wait_for(self._reader.read(max_bytes), timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all data."""
        self._writer.write(buffer)
        await asyncio.wait_for(self._writer.drain(), timeout)

    async def aclose(self) -> None:
        """Close the connection."""
        self._writer.close()


def open_http(url: str, token: str) -> httpx.AsyncClient:
    """Return an HTTP client of the server.

    Args:
        url: Address of the server.
        token: Token of a user or of a run.
    """
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if hasattr(socket, "TCP_KEEPIDLE"):
        options.append((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S))
    parsed = httpx.URL(url)
    trust_env = not is_loopback(parsed.host)
    verify = certificates(parsed.scheme)
    transport = httpx.AsyncHTTPTransport(
        verify=verify,
        trust_env=trust_env,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=2),
        socket_options=options,
    )
    return httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        transport=transport,
        trust_env=trust_env,
    )


@asynccontextmanager
async def open_tunnel(http: httpx.AsyncClient, path: str) -> AsyncIterator[Stream]:
    """Open a tunnel at a path of the server.

    Args:
        http: Client of the server.
        path: Path of a task, or of the tunnels of a run.

    Raises:
        UnreachableError: If the server does not respond.
        ForbiddenError: If the token is not accepted.
        ZerolabError: If the server refuses for another reason.
    """
    import httpcore

    headers = {"Connection": "Upgrade", "Upgrade": "tcp"}
    # After the upgrade, the stream raises the errors of httpcore, on which httpx is built.
    lost = (httpx.HTTPError, httpcore.NetworkError, httpcore.TimeoutException)
    try:
        async with http.stream("GET", path, headers=headers) as response:
            if response.status_code != 101:
                text = (await response.aread()).decode(errors="replace")
                kind = ForbiddenError if response.status_code in (401, 403) else ZerolabError
                raise kind(_message(text) or f"the server responded {response.status_code}")
            yield response.extensions["network_stream"]
    except lost as error:
        raise UnreachableError(f"{http.base_url}: {error or type(error).__name__}") from error


def _message(text: str) -> str:
    import json

    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return ""


async def relay(left: Stream, right: Stream) -> None:
    """Pass bytes on in both directions until either side closes its connection.

    Args:
        left: One connection.
        right: The other one.
    """

    async def copy(source: Stream, target: Stream) -> None:
        while data := await source.read(_CHUNK_BYTES):
            await target.write(data)

    directions = [asyncio.create_task(copy(left, right)), asyncio.create_task(copy(right, left))]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        await left.aclose()
        await right.aclose()
