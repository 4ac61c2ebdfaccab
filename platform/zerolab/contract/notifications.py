"""Events of experiments about which notification channels send messages."""

import re
from typing import Any, Literal, get_args

from zerolab.contract.names import printable
from zerolab.errors import one_line

__all__ = [
    "DEFAULT_EVENTS",
    "EVENTS",
    "EventName",
    "alert_text",
    "check_channel_name",
]

EventName = Literal[
    "finished",
    "failed",
    "canceled",
    "trial_failed",
    "alert",
    "restarts",
    "preempted",
    "log_pattern",
    "nan",
    "improved",
    "waiting",
    "stalled",
]

EVENTS: tuple[EventName, ...] = get_args(EventName)

DEFAULT_EVENTS: tuple[EventName, ...] = ("finished", "failed", "alert")
"""Events of a channel that names none."""

_MAX_ALERT_TITLE, _MAX_ALERT_TEXT = 200, 4000


def check_channel_name(name: str) -> str:
    """Return the name of a channel after validation.

    Raises:
        ValueError: If it is invalid.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
        msg = "must be 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit, "
        raise ValueError(f"{msg}got {name[:80]!r}")
    return name


def alert_text(title: Any, text: Any) -> tuple[str, str]:
    """Return title and text of an alert as stored; never fails.

    Args:
        title: Converted to one printable line of at most 200 characters.
        text: Converted to printable lines of at most 4,000 characters.
    """
    lines = _text(text)[:_MAX_ALERT_TEXT].splitlines()
    shown = "\n".join(printable(line) for line in lines)
    return printable(" ".join(_text(title)[:_MAX_ALERT_TITLE].split())) or "Alert", shown


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - an alert must not stop the training
        return f"{type(value).__name__} whose str() raises {one_line(error)}"
