"""Connections of those who have not said anything yet, and of those who do not listen.

Before a request's header is whole nobody is known, so this costs no token: a connection that is
opened and left, or fed a byte a minute. Each of them takes a file of the process, of which there
are so many. So a header must be whole within seconds, an answer must be read on within a minute,
and one peer has at most half of the files: its oldest connection without a header makes room.
"""

import asyncio
import logging
import resource
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["Patience", "protocol_of", "raise_file_limit"]

logger = logging.getLogger(__name__)

_HEADER_BYTES = 256 * 1024
_MOST_FILES = 65_536
_SAY_S = 60.0


@dataclass
class Patience:
    """What connections may take; shared by all of one server, on the event loop's thread."""

    header_s: float = 10.0
    """From the first byte of a request, or the connection, to the end of its header; and for the
    rest of a body that is not wanted any more."""
    stalled_s: float = 60.0
    """For a client that takes nothing of its answer."""
    most_of_peer: int = 512
    """Connections from one address."""
    _open: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _waiting: defaultdict[str, dict["_Connection", None]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By address: connections without a whole header, the oldest first."""
    closed: int = 0
    """How many connections have been closed for it."""
    _said: float = -_SAY_S

    def enter(self, connection: "_Connection") -> None:
        """Count a new connection; if its peer has too many, one of those that say nothing goes."""
        peer = connection.peer
        self._open[peer] += 1
        if self._open[peer] > self.most_of_peer:
            oldest = next(iter(self._waiting[peer]), connection)
            self.close(oldest, f"its address has {self._open[peer]} connections")

    def leave(self, connection: "_Connection") -> None:
        """Forget a connection."""
        peer = connection.peer
        self.heard(connection)
        self._open[peer] -= 1
        if self._open[peer] <= 0:
            del self._open[peer]

    def expect(self, connection: "_Connection") -> None:
        """Note that a connection owes a header."""
        self._waiting[connection.peer].setdefault(connection)

    def heard(self, connection: "_Connection") -> None:
        """Note that it came, or never will."""
        waiting = self._waiting[connection.peer]
        waiting.pop(connection, None)
        if not waiting:
            del self._waiting[connection.peer]

    def close(self, connection: "_Connection", why: str) -> None:
        """Close a connection at once, and say so once a minute."""
        connection.transport.abort()
        self.closed += 1
        if time.monotonic() - self._said >= _SAY_S:
            self._said = time.monotonic()
            logger.warning(
                "a connection of %s was closed: %s (%d so far)", connection.peer, why, self.closed
            )


class _Connection(HttpToolsProtocol):
    """uvicorn's own, with limits."""

    patience: Patience

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.peer = ""
        self._head_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, and expect a header."""
        super().connection_made(transport)
        self.peer = self.client[0] if self.client else ""
        self.patience.enter(self)
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        super().connection_lost(exc)
        for timer in (self._header_timer, self._body_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self.patience.leave(self)

    def data_received(self, data: bytes) -> None:
        """Take what came, unless a header does not end."""
        if self._header_timer is not None:
            if self._head_bytes > _HEADER_BYTES:
                self.patience.close(self, f"its header is longer than {_HEADER_BYTES} bytes")
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Expect the rest of a header."""
        super().on_message_begin()
        self._expect_header()

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self.patience.heard(self)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the body is whole."""
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Give the rest of a body that was not read a little time to come."""
        unread = self.cycle.response_complete and self.cycle.more_body
        super().on_response_complete()
        if unread and self._body_timer is None:
            self._body_timer = self.loop.call_later(self.patience.header_s, self._no_body)

    def pause_writing(self) -> None:
        """See from now on whether the client takes anything."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _expect_header(self) -> None:
        self._head_bytes = 0
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.patience.header_s, self._no_header)
            self.patience.expect(self)

    def _no_header(self) -> None:
        self.patience.close(self, f"no whole request header in {self.patience.header_s:g} s")

    def _no_body(self) -> None:
        self.patience.close(self, "the body of an answered request does not end")

    def _watch(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.patience.stalled_s, self._look, left)

    def _look(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch()
        else:
            why = f"it has read nothing of its answer for {self.patience.stalled_s:g} s"
            self.patience.close(self, why)


def protocol_of(limits: Patience) -> type[HttpToolsProtocol]:
    """Return the protocol of a server whose connections share ``limits``."""

    class Connection(_Connection):
        patience = limits

    return Connection


def raise_file_limit() -> int:
    """Let this process have as many files as it may; return how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        logger.info("files and connections: up to %d (%d before)", wanted, soft)
    return max(wanted, soft)
