"""Transport that sends the header and the body of a small response in one packet.

uvicorn writes them separately, and each write to a socket costs the server and the client about as
much as the rest of the HTTP handling of a small request.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

__all__ = ["JoinedWrites"]

_MAX_BYTES = 16 * 1024
"""Maximum size of a first write that waits for a second one."""


class JoinedWrites:
    """Wrapper of a transport that joins two small writes in the same iteration of the event loop.

    Args:
        transport: Transport of the connection; does everything but writing.
        loop: Event loop of the connection.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting = b""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write at once, or with the next data, at the latest in the next iteration of the loop."""
        if self._waiting:
            data = self._waiting + data
            self._waiting = b""
            self._transport.write(data)
        elif len(data) > _MAX_BYTES:
            self._transport.write(data)
        else:
            self._waiting = data
            self._loop.call_soon(self._flush)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        """Write pieces after what waits."""
        self.write(b"".join(pieces))

    def close(self) -> None:
        """Close the connection after all data is sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._waiting and not self._transport.is_closing():
            self._transport.write(self._waiting)
        self._waiting = b""
