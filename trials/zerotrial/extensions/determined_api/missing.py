"""Errors for names of Determined that have no replacement."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from zerolab.replacements import replacements

__all__ = ["missing_name"]


def missing_name(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: it raises an error that names an alternative."""

    def is_submodule(name: str) -> bool:
        is_package = hasattr(sys.modules.get(module), "__path__")
        return is_package and importlib.util.find_spec(f"{module}.{name}") is not None

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if is_submodule(name):  # `from determined.pytorch import deepspeed`
            return importlib.import_module(f"{module}.{name}")
        names = replacements(f"{module}.")
        inner = (text for key, text in names.items() if key.startswith(f"{name}."))
        hint = names.get(name) or next(inner, None)  # of a name in a module that is missing
        instead = f"; instead: {hint}" if hint else "; see docs/migrate/from_determined.md"
        raise ImportError(f"{module}.{name} is not supported by Zerolab{instead}", name=module)

    return find
