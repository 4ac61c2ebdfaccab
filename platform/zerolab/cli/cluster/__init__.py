"""Commands about the machines and the queue: ``agent``, ``job``, ``pool``, ``quota``, ``task``."""

from typing import Any

__all__ = ["NUMBERS"]

NUMBERS: dict[str, Any] = {"ignore_unknown_options": True}
"""Settings of a command whose argument is a number: -1 is one, to be told its bounds, no option."""
