"""Waiting for conditions in tests, and the time limit of all tests.

The limit only ends a hang. Conditions are met long before it, also on two busy cores.
"""

import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["DEADLINE_S", "free_port", "until"]

DEADLINE_S = 300.0
"""Seconds after which a wait is a hang."""

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.002, 0.5
_PAUSE_SHARE = 0.08
"""Pause between two calls, as a share of the time waited: probes cost the server CPU time."""

T = TypeVar("T")


def until(
    description: str,
    probe: Callable[[], T],
    accept: Callable[[T], object] = bool,
    *,
    not_yet: type[Exception] | tuple[type[Exception], ...] = (),
    details: Callable[[], object] | None = None,
    deadline_s: float = DEADLINE_S,
) -> T:
    """Call a function repeatedly until its result is accepted; return the result.

    Args:
        description: Condition, as a sentence: "the server answers".
        probe: Returns the current value.
        accept: Whether the value meets the condition; by default any true value.
        not_yet: Exceptions of ``probe`` that mean "not yet".
        details: Returns text, such as a log, for the message of a failure.
        deadline_s: Seconds after which the wait fails.

    Raises:
        AssertionError: After the deadline, with the description and the last value.
    """
    started = time.monotonic()
    deadline = started + deadline_s
    while True:
        expired = (
            time.monotonic() > deadline
        )  # read before the last probe, so that a slow probe counts
        try:
            value = probe()
            if accept(value):
                return value
            last = repr(value)
        except not_yet as error:
            last = repr(error)
        if expired:
            suffix = f"\n{details()}" if details is not None else ""
            raise AssertionError(
                f"not within {deadline_s:g} s: {description}; last seen: {last}{suffix}"
            )
        waited = time.monotonic() - started
        time.sleep(min(max(_PAUSE_SHARE * waited, _MIN_PAUSE_S), _MAX_PAUSE_S))


def free_port() -> int:
    """Return a free port that no outgoing connection of this machine uses."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # below the system's own range
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
