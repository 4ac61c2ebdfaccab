"""Unsupported keys: the values that turn a key off, and the advice for other values."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BLOCK",
    "EMPTY",
    "NEVER_OFF",
    "SWITCH",
    "OffValues",
    "UnsupportedKey",
    "remove_unsupported",
    "values",
]


@dataclass(frozen=True)
class OffValues:
    """Values that turn a key off; ``null`` always does."""

    text: str
    """The values, for the documents."""

    matches: Callable[[Any], bool]


@dataclass(frozen=True)
class UnsupportedKey:
    """A key without counterpart."""

    instead: str
    """Advice for the user."""

    off: OffValues
    """Values that are accepted because they request nothing."""


def values(off: Sequence[Any]) -> OffValues:
    """Match exactly these values, with their types: ``1`` is not ``true``."""

    def matches(value: Any) -> bool:
        return any(type(value) is type(expected) and value == expected for expected in off)

    return OffValues(", ".join(f"`{_as_json(value)}`" for value in off), matches)


def _as_json(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def _is_disabled(value: Any) -> bool:
    return value is False or (isinstance(value, Mapping) and value.get("enabled", False) is False)


SWITCH = values([False])
"""A switch that is off by default."""

NEVER_OFF = OffValues("", lambda _: False)
"""A key that is on whenever it is present."""

EMPTY = OffValues("`false`, empty", lambda value: value is False or value in ("", [], {}))
"""A key that requests nothing if its value is empty."""

BLOCK = OffValues("`false`, without `enabled: true`", _is_disabled)
"""A block that is off unless it is enabled."""


def remove_unsupported(
    data: Mapping[str, Any], table: Mapping[str, UnsupportedKey], opaque: Collection[str]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Remove the unsupported keys from a file.

    Args:
        data: The file.
        table: Unsupported keys, by dotted key.
        opaque: Dotted keys whose content belongs to the user.

    Returns:
        The file without them, one problem for each key that is on, and the keys that are off.
    """
    problems: list[str] = []
    off: list[str] = []

    def take(block: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        supported: dict[str, Any] = {}
        for name, value in block.items():
            key = f"{prefix}{name}"
            if key not in table:
                inside = isinstance(value, Mapping) and key not in opaque
                supported[name] = take(value, f"{key}.") if inside else value
            elif value is None or table[key].off.matches(value):
                off.append(key)
            else:
                problems.append(f"{key}: is not supported; {table[key].instead}")
        return supported

    return take(data, ""), problems, off
