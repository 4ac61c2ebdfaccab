"""Timeouts for idle and slow clients, and a limit of connections per address.

A client needs no token until its header is complete. It could open idle connections or send a byte
a minute, and each connection uses a file descriptor. Therefore a header must be complete within
seconds, and a client must read its response within a minute. One address may use at most half of
the descriptors; its oldest connection without a header is closed first.
"""

import asyncio
import logging
import resource
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from zeroserver.access.joined_writes import JoinedWrites
from zeroserver.access.upgrades import UPGRADE, ByteStream

__all__ = ["ConnectionLimits", "limited_protocol", "raise_file_limit"]

logger = logging.getLogger(__name__)

_HEADER_BYTES = 256 * 1024
_MAX_FILES = 65_536
_WARN_INTERVAL_S = 60.0


class ConnectionLimits(msgspec.Struct):
    """Limits of a server's connections; used only on the event loop's thread."""

    header_s: float = 10.0
    """Seconds from the connection, or the first byte of a request, to the end of its header. Also
    the timeout for the remainder of a body that is no longer needed."""
    stalled_s: float = 60.0
    """Seconds until a client that does not read its response is disconnected."""
    max_per_peer: int = 512
    """Maximum number of connections from one address."""
    _open: defaultdict[str, int] = msgspec.field(default_factory=lambda: defaultdict(int))
    _waiting: defaultdict[str, dict["_Connection", None]] = msgspec.field(
        default_factory=lambda: defaultdict(dict)
    )
    """Connections without a complete header by address, oldest first."""
    closed: int = 0
    """Number of connections closed by a limit."""
    _last_warning: float = -_WARN_INTERVAL_S

    def enter(self, connection: "_Connection") -> None:
        """Count a new connection; close an idle one if its peer has too many."""
        peer = connection.peer
        self._open[peer] += 1
        if self._open[peer] > self.max_per_peer:
            oldest = next(iter(self._waiting[peer]), connection)
            self.close(oldest, f"its address has {self._open[peer]} connections")

    def leave(self, connection: "_Connection") -> None:
        """Stop counting a closed connection."""
        peer = connection.peer
        self.header_received(connection)
        self._open[peer] -= 1
        if self._open[peer] <= 0:
            del self._open[peer]

    def expect(self, connection: "_Connection") -> None:
        """Record that a connection waits for a header."""
        self._waiting[connection.peer].setdefault(connection)

    def header_received(self, connection: "_Connection") -> None:
        """Stop waiting for a header of a connection."""
        waiting = self._waiting[connection.peer]
        waiting.pop(connection, None)
        if not waiting:
            del self._waiting[connection.peer]

    def close(self, connection: "_Connection", reason: str) -> None:
        """Close a connection at once; log it at most once a minute."""
        connection.transport.abort()
        self.closed += 1
        if time.monotonic() - self._last_warning >= _WARN_INTERVAL_S:
            self._last_warning = time.monotonic()
            logger.warning(
                "a connection of %s was closed: %s (%d so far)",
                connection.peer,
                reason,
                self.closed,
            )


class _Connection(HttpToolsProtocol):
    """HTTP protocol of uvicorn with limits."""

    limits: ConnectionLimits

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.peer = ""
        self._head_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stream: ByteStream | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection and wait for a header."""
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self.peer = self.client[0] if self.client else ""
        self.limits.enter(self)
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop its timers and counting it."""
        super().connection_lost(exc)
        for timer in (self._header_timer, self._body_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        if self._stream is not None:
            self._stream.feed_eof()
        self.limits.leave(self)

    def data_received(self, data: bytes) -> None:
        """Parse received data, unless the header is too long or the connection was upgraded."""
        if self._stream is not None:
            self._stream.feed(data)
            return
        if self._header_timer is not None:
            if self._head_bytes > _HEADER_BYTES:
                self.limits.close(self, f"its header is longer than {_HEADER_BYTES} bytes")
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Wait for the remainder of a header."""
        super().on_message_begin()
        self._expect_header()

    def on_headers_complete(self) -> None:
        """Stop the header timer."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self.limits.header_received(self)
        if self.parser.should_upgrade():
            self.scope["extensions"] = {UPGRADE: self._upgrade}  # type: ignore[dict-item]
        super().on_headers_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: routes decide about upgrades, and others ignore them."""

    def _upgrade(self, headers: Sequence[tuple[bytes, bytes]]) -> ByteStream:
        """Send the status 101 and leave HTTP; see :data:`zeroserver.access.upgrades.Upgrade`."""
        if self.cycle.disconnected or self.transport.is_closing():
            raise ConnectionResetError
        self.cycle.response_started = self.cycle.response_complete = True
        self._stream = ByteStream(self.transport, self.flow, self.loop)
        self.flow.resume_reading()
        lines = [b"HTTP/1.1 101 Switching Protocols", b"connection: upgrade"]
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join([*lines, b"", b""]))
        return self._stream

    def on_message_complete(self) -> None:
        """Stop the body timer."""
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start a timer for the unread remainder of a body."""
        unread = self.cycle.response_complete and self.cycle.more_body
        super().on_response_complete()
        if unread and self._body_timer is None:
            self._body_timer = self.loop.call_later(self.limits.header_s, self._close_without_body)

    def pause_writing(self) -> None:
        """Start to check whether the client reads the response."""
        super().pause_writing()
        self._watch_progress()

    def resume_writing(self) -> None:
        """Stop the timer: the client reads."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _expect_header(self) -> None:
        self._head_bytes = 0
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(
                self.limits.header_s, self._close_without_header
            )
            self.limits.expect(self)

    def _close_without_header(self) -> None:
        self.limits.close(self, f"no whole request header in {self.limits.header_s:g} s")

    def _close_without_body(self) -> None:
        self.limits.close(self, "the body of an answered request does not end")

    def _watch_progress(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(
            self.limits.stalled_s, self._check_progress, unsent
        )

    def _check_progress(self, unsent_before: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_before:
            self._watch_progress()
        else:
            message = f"it has read nothing of its answer for {self.limits.stalled_s:g} s"
            self.limits.close(self, message)


def limited_protocol(shared_limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """Return a protocol class whose connections share the limits."""

    class Connection(_Connection):
        limits = shared_limits

    return Connection


def raise_file_limit() -> int:
    """Raise the limit of open files to the permitted maximum; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if new_limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        logger.info("raised the limit of open files from %d to %d", soft, new_limit)
    return max(new_limit, soft)
