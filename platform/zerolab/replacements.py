"""Replacements of another platform's names, commands and keys, for messages and docs.

An extension has the table. A key is what a user of that platform types. ``det experiment create``
is a command; ``determined.core.init`` a Python name, for itself and all below it;
``init(preempt_mode)`` an argument of ``zerolab.core.init``; ``TrainContext.log`` an attribute of
one of our classes; ``Callback.trial_cleanup`` a method of a callback; ``experiment.workspace`` a
key of an experiment file; ``searcher.name: adaptive`` a value.
"""

from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

from zerolab.registry import PARTS

__all__ = [
    "NamesReplacements",
    "ReadFile",
    "command_replacement",
    "import_error",
    "replacements",
    "scan_script",
]

ReadFile = Callable[[str], bytes | None]
"""Reads a file of the model directory by its path; None when it does not exist."""


@cache
def _table() -> dict[str, str]:
    platform = PARTS.find("determined")
    return platform.table() if platform else {}


def replacements(prefix: str) -> dict[str, str]:
    """Return the entries whose key begins with a prefix, without the prefix.

    Example:
        ``replacements("det ")["experiment create"]``
    """
    return {
        key.removeprefix(prefix): text for key, text in _table().items() if key.startswith(prefix)
    }


def command_replacement(*command: str) -> str | None:
    """Return what replaces a command, e.g. ``("user", "login")``; None if unknown."""
    platform = PARTS.find("determined")
    return platform.command(*command) if platform else None


def scan_script(entry: str, read: ReadFile, search_path: Collection[str] = ()) -> list[str]:
    """Find names of other platforms in a script, which is read as text and never imported.

    Args:
        entry: Path in the model directory of the script or of the trial class's module.
        read: Reads such files.
        search_path: Folders of ``PYTHONPATH``.

    Returns:
        One line for each name with its first position and its replacement.
    """
    platform = PARTS.find("determined")
    return platform.scan_script(entry, read, search_path) if platform else []


def import_error(module: str, name: str, *parents: str) -> ImportError | None:
    """Make the error for a missing module attribute that Determined has; None if it has none.

    It is an ImportError because ``from module import name`` drops the text of an AttributeError.

    Args:
        module: Name of our module.
        name: The attribute.
        parents: Determined's modules that may have it, e.g. ``determined.core``.
    """
    for parent in parents:
        text = _table().get(f"{parent}.{name}")
        if text is not None:
            return ImportError(f"{module} has no {name!r}; instead: {text}", name=module)
    return None


class NamesReplacements:
    """Base class whose error for a missing attribute names the replacement."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError with Determined's replacement, or with a similar name."""
            kind = type(self)
            texts = (_table().get(f"{base.__name__}.{name}") for base in kind.__mro__)
            hint = next((f"; {text}" for text in texts if text), "")
            if not hint:
                public = [attribute for attribute in dir(kind) if not attribute.startswith("_")]
                close = get_close_matches(name, public, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
            message = f"{kind.__name__} has no attribute {name!r}{hint}"
            # Without the object Python adds no similar name to a traceback.
            raise AttributeError(message, name=name, obj=None if hint else self)
