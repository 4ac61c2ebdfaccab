"""Hyperparameters as a flat list: leaves by their dotted names."""

import json
from collections.abc import Iterable
from typing import Any

__all__ = ["Leaf", "leaves"]

Leaf = float | int | str | bool | None
"""Lists of plain values, and what is empty, are their JSON."""


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
