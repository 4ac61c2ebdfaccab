"""Events of experiments about which notification channels send messages."""

import re
from typing import Literal, get_args

__all__ = [
    "DEFAULT_EVENTS",
    "EVENTS",
    "EventName",
    "check_channel_name",
]

EventName = Literal["finished", "failed", "canceled", "trial_failed"]

EVENTS: tuple[EventName, ...] = get_args(EventName)

DEFAULT_EVENTS: tuple[EventName, ...] = ("finished", "failed")
"""Events of a channel that names none."""


def check_channel_name(name: str) -> str:
    """Return the name of a channel after validation.

    Raises:
        ValueError: If it is invalid.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
        msg = "must be 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit, "
        raise ValueError(f"{msg}got {name[:80]!r}")
    return name
