"""Byte streams of connections that have left HTTP with ``101 Switching Protocols``."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.types import Scope

__all__ = ["UPGRADE", "ByteStream", "Flow", "Upgrade", "upgrade_of"]

UPGRADE = "zerolab.upgrade"
"""ASGI extension of requests with an ``Upgrade`` header: an :data:`Upgrade`."""
_BUFFER_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024


class Flow(Protocol):
    """Flow control of a transport."""

    async def drain(self) -> None:
        """Wait until the transport accepts more data."""


class ByteStream:
    """Both directions of an upgraded connection, with back-pressure.

    Args:
        transport: Transport of the connection.
        flow: Its flow control.
        loop: Its event loop.
    """

    def __init__(
        self, transport: asyncio.Transport, flow: Flow, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport = transport
        self._flow = flow
        self._reader = asyncio.StreamReader(_BUFFER_BYTES, loop)
        self._reader.set_transport(transport)  # stops reading while the buffer is full
        self.closed = False
        """Whether the connection is closed."""

    def feed(self, data: bytes) -> None:
        """Add received data."""
        self._reader.feed_data(data)

    def feed_eof(self) -> None:
        """Record that the connection is closed."""
        self.closed = True
        self._reader.feed_eof()

    async def read(self) -> bytes:
        """Wait for data; empty after the end of the connection."""
        return await self._reader.read(_CHUNK_BYTES)

    async def write(self, data: bytes) -> None:
        """Send data and wait until the client has read most of it.

        Raises:
            ConnectionResetError: If the connection is closed.
        """
        if self.closed or self._transport.is_closing():
            raise ConnectionResetError
        self._transport.write(data)
        await self._flow.drain()

    def close(self) -> None:
        """Close the connection after all data is sent."""
        if not self.closed:
            self._transport.close()


Upgrade = Callable[[Sequence[tuple[bytes, bytes]]], ByteStream]
"""Sends the status 101 with these headers; after that the route must send no response.

Clients must not send further data before they have received it. It raises ConnectionResetError if
the client has gone.
"""


def upgrade_of(scope: Scope) -> Upgrade | None:
    """Return the function that upgrades the connection of a request; None for other requests."""
    upgrade: Upgrade | None = scope.get("extensions", {}).get(UPGRADE)
    return upgrade
