"""The one way in which tests wait for something, and the one place for their time limits.

A limit is there to end a hang, and says nothing about how long a thing should take: what passes
does so long before it, also on two cores that have other work to do.
"""

import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["DEADLINE_S", "free_port", "until"]

DEADLINE_S = 300.0
"""Seconds for anything that must happen; what takes longer hangs."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05

T = TypeVar("T")


def until(
    what: str,
    look: Callable[[], T],
    accept: Callable[[T], object] = bool,
    *,
    not_yet: type[Exception] | tuple[type[Exception], ...] = (),
    told: Callable[[], object] | None = None,
    deadline_s: float = DEADLINE_S,
) -> T:
    """Look again and again until what is seen is accepted; return it.

    Args:
        what: Is waited for, as a sentence: "the server answers".
        look: Returns what is to be seen now.
        accept: Whether that is it; by default when it is true.
        not_yet: Exceptions of ``look`` that mean "not yet".
        told: Asked when it does not happen; what it returns (a log) ends the message.
        deadline_s: Seconds after which it is a hang.

    Raises:
        AssertionError: It did not happen; names what was waited for and what was seen last.
    """
    end = time.monotonic() + deadline_s
    pause = _SHORTEST_PAUSE_S
    while True:
        late = time.monotonic() > end  # asked before the last look: a slow one counts
        try:
            seen = look()
            if accept(seen):
                return seen
            last = repr(seen)
        except not_yet as error:
            last = repr(error)
        if late:
            more = f"\n{told()}" if told is not None else ""
            raise AssertionError(f"not within {deadline_s:g} s: {what}; last seen: {last}{more}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def free_port() -> int:
    """Find a free port of this machine that no outgoing connection takes while we are away."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # below the system's own range
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
