"""Errors for names of Determined that have no replacement."""

from collections.abc import Callable
from typing import Any

from zerolab.replacements import replacements

__all__ = ["missing_name"]


def missing_name(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: it raises an error that names an alternative."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        hint = replacements(f"{module}.").get(name)
        instead = f"; instead: {hint}" if hint else "; see docs/migrate/from_determined.md"
        raise ImportError(f"{module}.{name} is not supported by Zerolab{instead}", name=module)

    return find
