"""Hyperparameters as a flat list: leaves by their dotted names."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Leaf", "leaves", "short_names"]

Leaf = float | int | str | bool | None
"""Lists of plain values, and what is empty, are their JSON."""

_SHORT = 20
"""Characters that a name may have and stay whole."""


def leaves(tree: Any) -> dict[str, Leaf]:
    """Take hyperparameters apart: ``optimizer.lr``, ``layers.0.width``."""
    found: dict[str, Leaf] = {}
    _collect(found, "", tree)
    return found


def _collect(found: dict[str, Leaf], path: str, tree: Any) -> None:
    below: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        below = tree.items()
    elif isinstance(tree, list) and any(isinstance(each, dict | list) for each in tree):
        below = enumerate(tree)
    for key, value in below:
        _collect(found, f"{path}.{key}" if path else str(key), value)
    if path and not below:
        plain = tree is None or isinstance(tree, str | int | float)
        found[path] = tree if plain else json.dumps(tree, separators=(",", ":"))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Say what hyperparameters are called where there is little room, such as a table's heads.

    A long name is told by its shortest tail of whole parts that no other name has, and that does
    not begin with a number: ``optimizer.params.lr`` beside ``scheduler.params.lr``. The page's
    ``shortNames`` is the same rule.
    """
    known = dict.fromkeys(names)
    count = Counter(tail for name in known for tail in _tails(name))

    def short(name: str) -> str:
        return (
            name if len(name) <= _SHORT else next((t for t in _tails(name) if count[t] == 1), name)
        )

    return {name: short(name) for name in known}


def _tails(name: str) -> Iterator[str]:
    """The last part of a dotted name, the last two, ...: those that begin with a word."""
    parts = name.split(".")
    for first in reversed(range(len(parts))):
        if parts[first] and not parts[first].isdigit():
            yield ".".join(parts[first:])
