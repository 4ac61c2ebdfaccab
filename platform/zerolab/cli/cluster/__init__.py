"""Commands for machines and the queue: ``agent``, ``job``, ``pool``, ``quota``, ``task``."""

from typing import Any

__all__ = ["NUMBERS"]

NUMBERS: dict[str, Any] = {"ignore_unknown_options": True}
"""Settings of a command with a number as argument: -1 is a number out of range, not an option."""
