"""What to do instead of a public name of DeepSpeed that has no counterpart.

``absent.json`` has, by module (or class), what to do instead and the names that it is said of.
"""

import json
from functools import cache
from pathlib import Path

__all__ = ["instead_of_module", "instead_of_name", "methods"]


def instead_of_name(module: str, name: str) -> str:
    """What follows the message that a module has no such name; empty for a name not in the table.

    Args:
        module: Of DeepSpeed, dotted.
        name: In it.
    """
    told = _told(module).get(name)
    return f": {told}" if told else ""


def instead_of_module(fullname: str) -> str:
    """What follows the message that there is no such module; empty for one not in the table.

    Args:
        fullname: Of a module of DeepSpeed, dotted.
    """
    parts = fullname.split(".")
    for count in range(len(parts), 1, -1):
        within = ".".join(parts[:count])
        told = _told(".".join(parts[: count - 1])).get(parts[count - 1])
        of_its_names = set(_told(within).values())
        if told is None and len(of_its_names) == 1:
            (told,) = of_its_names
        if told is not None:
            return f": {told}"
    return ""


def methods(kind: str) -> dict[str, str]:
    """Methods of one of DeepSpeed's classes that there are not, to what to do instead."""
    return _told(kind)


@cache
def _told(home: str) -> dict[str, str]:
    return {
        name: told.replace("`", "")
        for told, names in _table().get(home, {}).items()
        for name in names
    }


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    file = Path(__file__).with_name("absent.json")
    table: dict[str, dict[str, list[str]]] = json.loads(file.read_text(encoding="utf-8"))
    return table
