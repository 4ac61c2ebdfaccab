"""Hyperparameters as columns: dotted names, short names, and cells of a spreadsheet."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Leaf", "flatten_hparams", "safe_cell", "short_names"]

Leaf = float | int | str | bool | None
"""A value of a flat list. Lists of plain values and empty containers are JSON text."""
_SHORT = 20
"""Longest name, in characters, that is not shortened."""


def flatten_hparams(tree: Any) -> dict[str, Leaf]:
    """Flatten nested hyperparameters to dotted names.

    Example:
        >>> flatten_hparams({"optimizer": {"lr": 0.1}, "layers": [{"width": 8}]})
        {'optimizer.lr': 0.1, 'layers.0.width': 8}
    """
    values: dict[str, Leaf] = {}
    _collect(values, "", tree)
    return values


def _collect(values: dict[str, Leaf], path: str, tree: Any) -> None:
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, dict | list) for item in tree):
        children = enumerate(tree)
    for key, value in children:
        _collect(values, f"{path}.{key}" if path else str(key), value)
    if path and not children:
        plain = tree is None or isinstance(tree, str | int | float)
        values[path] = tree if plain else json.dumps(tree, separators=(",", ":"))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return short labels of hyperparameters, e.g. for column heads.

    A long name becomes its shortest unique tail of complete parts that does not begin with a
    number: ``optimizer.params.lr`` beside ``scheduler.params.lr``. ``shortNames`` in the web page
    follows the same rule.
    """
    unique = dict.fromkeys(names)
    count = Counter(tail for name in unique for tail in _tails(name))

    def short(name: str) -> str:
        return (
            name if len(name) <= _SHORT else next((t for t in _tails(name) if count[t] == 1), name)
        )

    return {name: short(name) for name in unique}


def _tails(name: str) -> Iterator[str]:
    """Yield the last part of a dotted name, the last two, ... that begin with a word."""
    parts = name.split(".")
    for first in reversed(range(len(parts))):
        if parts[first] and not parts[first].isdigit():
            yield ".".join(parts[first:])


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def safe_cell(text: str) -> str:
    """Prefix a text with a quote if a spreadsheet would read it as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
