"""Changes a module of another library right after it has been imported, and never imports it."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Patch", "patch_when_imported"]

Patch = Callable[[ModuleType], None]


def patch_when_imported(patches: Mapping[str, Patch]) -> None:
    """Patch modules now if they are imported already, else on import.

    Args:
        patches: Functions to call with a module, by its full name.
    """
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(patches))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a patch after the module it is for."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        del path, target
        if fullname not in self._patches or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._patches[fullname](module)

            loader.exec_module = exec_module
        return spec
