"""Keys that do not exist here: which values of them mean "off", and what to do about the others."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["BLOCK", "EMPTY", "NOTHING", "SWITCH", "Off", "Refused", "take_refused", "values"]


@dataclass(frozen=True)
class Off:
    """Which values of a key mean that it is off; ``null`` always does."""

    text: str
    """The values, for the documents."""

    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Refused:
    """A key without counterpart."""

    instead: str
    """What the user should do."""

    off: Off
    """Values that are accepted, since they ask for nothing."""


def values(off: Sequence[Any]) -> Off:
    """Exactly these, each of its own type: ``1`` is not ``true``."""

    def holds(value: Any) -> bool:
        return any(type(value) is type(known) and value == known for known in off)

    return Off(", ".join(f"`{_as_json(value)}`" for value in off), holds)


def _as_json(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def _is_disabled(value: Any) -> bool:
    return value is False or (isinstance(value, Mapping) and value.get("enabled", False) is False)


SWITCH = values([False])
"""Of a switch that is off unless it is turned on."""

NOTHING = Off("", lambda _: False)
"""Of a key that is on as soon as it is there."""

EMPTY = Off("`false`, empty", lambda value: value is False or value in ("", [], {}))
"""Of a key that asks for nothing when there is nothing in it."""

BLOCK = Off("`false`, without `enabled: true`", _is_disabled)
"""Of a block that is off unless it is enabled."""


def take_refused(
    data: Mapping[str, Any], table: Mapping[str, Refused], opaque: Collection[str]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Part a file from the keys that have no counterpart here.

    Args:
        data: The file.
        table: By dotted key.
        opaque: Dotted keys whose content is the user's own.

    Returns:
        The file without them, one problem for each that is on, and the keys that are off.
    """
    problems: list[str] = []
    off: list[str] = []

    def take(block: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        for name, value in block.items():
            key = f"{prefix}{name}"
            if key not in table:
                inside = isinstance(value, Mapping) and key not in opaque
                rest[name] = take(value, f"{key}.") if inside else value
            elif value is None or table[key].off.holds(value):
                off.append(key)
            else:
                problems.append(f"{key}: is not supported; {table[key].instead}")
        return rest

    return take(data, ""), problems, off
