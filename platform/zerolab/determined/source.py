"""Looking for Determined's names in a script's source: read as text, never imported."""

import ast
import importlib.util
import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from zerolab.determined.names import MODULES, RUNS_THERE, name_of
from zerolab.syntax import imported_files, imported_modules, module_paths, parsed

__all__ = ["problems_of"]

Read = Callable[[str], bytes | None]
"""A file of the model directory by its path; None when there is none."""


def problems_of(entry: str, read: Read, search_path: Collection[str] = ()) -> list[str]:
    """Say what a script asks of Determined, and what takes the place of each name.

    Only imports at the top of a file count: one inside ``try``, ``if`` or a function may be meant
    for another platform. A file is read with those of the model directory that it imports so.

    Args:
        entry: The script, or the module of the trial class: its path in the model directory.
        read: Reads such files.
        search_path: Further folders in which Python looks for modules, as ``PYTHONPATH`` names
            them: those outside of the model directory may hold anything.

    Returns:
        One line for each name, with the place where it is used first; none where the script does
        not ask Determined to run it, or may find another package of that name.
    """
    if any(posixpath.normpath(folder).startswith(("..", "/")) for folder in search_path):
        return []
    if _another_is_installed():
        return []
    found: dict[str, str] = {}
    for path, tree in _files(entry, read):
        if _has_its_own(tree, (".", posixpath.dirname(entry), *search_path), read):
            return []
        for line, name in _uses(tree):
            found.setdefault(name_of(name) or name, f"{path}:{line}")
    if not any(f"{name}.".startswith(f"{those}.") for name in found for those in RUNS_THERE):
        return []
    return [
        f"{place}: {name} is of Determined; instead: "
        f"{MODULES.get(name, 'nothing takes its place; see docs/from_determined.md')}"
        for name, place in found.items()
    ]


def _has_its_own(tree: ast.Module, folders: Iterable[str], read: Read) -> bool:
    """Whether a file imports a ``determined`` of one of these folders of the model directory."""
    names = {"determined", *filter(_is_of, imported_modules(tree))}
    return any(
        read(posixpath.normpath(posixpath.join(folder, path))) is not None
        for folder in folders
        for name in names
        for path in module_paths(name)
    )


def _another_is_installed() -> bool:
    """Whether a ``determined`` is installed here that is not Determined's, which has an ``ipc``."""
    try:
        spec = importlib.util.find_spec("determined")
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:  # the latter: a folder without __init__.py
        return False
    file = Path(spec.origin)
    return file.name != "__init__.py" or not (file.parent / "ipc.py").is_file()


def _is_of(module: str) -> bool:
    return module.partition(".")[0] == "determined"


def _files(entry: str, read: Read) -> Iterator[tuple[str, ast.Module]]:
    for path, source in imported_files(entry, read):
        tree = parsed(source)
        if tree is not None:
            yield path, tree


def _uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each thing of Determined's that a file uses."""
    known: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                if top == "determined":
                    known[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            above = node.module or ""
            if _is_of(above):
                for alias in node.names:
                    name = f"{above}.{alias.name}"
                    known[alias.asname or alias.name] = name
                    if name_of(name) is not None:
                        yield node.lineno, name
    inner: set[ast.AST] = set()
    for found in ast.walk(tree):
        if isinstance(found, ast.Attribute) and found not in inner:
            inner.add(found.value)
            parts, at = [found.attr], found.value
            while isinstance(at, ast.Attribute):
                inner.add(at.value)
                parts.insert(0, at.attr)
                at = at.value
            if isinstance(at, ast.Name) and at.id in known:
                yield found.lineno, ".".join([known[at.id], *parts])
