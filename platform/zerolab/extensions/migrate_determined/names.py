"""Determined's names, from ``determined.json``, and their search in scripts."""

import ast
import importlib.util
import json
import posixpath
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

from zerolab.extensions.config_checks.syntax import imported_files, imported_modules, parsed
from zerolab.replacements import ReadFile
from zerolab.syntax import module_paths

__all__ = ["command", "scan_script", "table"]

_ABBREVIATIONS = {
    "cmd": "command",
    "lc": "list-checkpoints",
    "lt": "list-trials",
    "rp": "resource-pool",
    "tb": "tensorboard",
    "tpl": "template",
    "u": "update",
}

_RUNNERS = (
    *("determined.core", "determined.experimental.core_v2", "determined.experimental.unmanaged"),
    *("determined.get_cluster_info", "determined.keras", "determined.launch"),
    *("determined.lightning", "determined.pytorch", "determined.searcher"),
    "determined.transformers",
)
"""Names with which a script needs Determined to run it; other names work in any script."""


@cache
def table() -> dict[str, str]:
    """Return the content of ``determined.json``."""
    text = Path(__file__).with_name("determined.json").read_text(encoding="utf-8")
    content: dict[str, str] = json.loads(text)
    return content


def command(*words: str) -> str | None:
    """Return what replaces a command of ``det``; None if it is unknown."""
    full = " ".join(_ABBREVIATIONS.get(part, part) for part in words)
    return table().get(f"det {full}") or table().get(f"det {' '.join(words)}")


def scan_script(entry: str, read: ReadFile, search_path: Collection[str] = ()) -> list[str]:
    """Find Determined's names; see :func:`zerolab.replacements.scan_script`.

    Only imports at the top of a file count: one inside ``try``, ``if`` or a function may be for
    another platform. Files of the model directory that are imported so are read as well.
    Nothing is reported if the script does not need Determined to run it, or may import another
    package of that name, such as one in a folder of ``PYTHONPATH`` outside of the directory.
    """
    if any(posixpath.normpath(folder).startswith(("..", "/")) for folder in search_path):
        return []
    if _other_package_installed():
        return []
    places: dict[str, str] = {}
    for path, source in imported_files(entry, read):
        tree = parsed(source)
        if tree is None:
            continue
        if _has_local_package(tree, (".", posixpath.dirname(entry), *search_path), read):
            return []
        for line, name in _used_names(tree):
            places.setdefault(_known_part(name) or name, f"{path}:{line}")
    if not any(f"{name}.".startswith(f"{runner}.") for name in places for runner in _RUNNERS):
        return []
    return [
        f"{position}: {name} is of Determined; instead: "
        f"{table().get(name, 'nothing takes its place; see docs/migrate/from_determined.md')}"
        for name, position in places.items()
    ]


def _known_part(name: str) -> str | None:
    """Return the longest leading part of a dotted name that is in the table."""
    parts = name.split(".")
    leading = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
    return next((part for part in leading if part in table()), None)


def _has_local_package(tree: ast.Module, folders: Iterable[str], read: ReadFile) -> bool:
    """Return whether a file imports a ``determined`` of the model directory."""
    names = {"determined", *filter(_is_determined, imported_modules(tree))}
    return any(
        read(posixpath.normpath(posixpath.join(folder, path))) is not None
        for folder in folders
        for name in names
        for path in module_paths(name)
    )


def _other_package_installed() -> bool:
    """Return whether an unrelated ``determined`` is installed; Determined's has an ``ipc``."""
    try:
        spec = importlib.util.find_spec("determined")
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:  # no origin: a folder without __init__.py
        return False
    file = Path(spec.origin)
    return file.name != "__init__.py" or not (file.parent / "ipc.py").is_file()


def _is_determined(module: str) -> bool:
    return module.partition(".")[0] == "determined"


def _used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of each use of Determined in a file."""
    imported: dict[str, str] = {}  # name in the file: Determined's name
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_determined(alias.name):
                    name = alias.name if alias.asname else "determined"
                    imported[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            for alias in node.names if _is_determined(module) else ():
                name = f"{module}.{alias.name}"
                imported[alias.asname or alias.name] = name
                if _known_part(name) is not None:
                    yield node.lineno, name
    # ast.walk yields an attribute before its inner ones, so only whole chains `a.b.c` are used.
    inner: set[ast.AST] = set()
    for use in ast.walk(tree):
        if isinstance(use, ast.Attribute) and use not in inner:
            parts: list[str] = []
            value: ast.expr = use
            while isinstance(value, ast.Attribute):
                inner.add(value)
                parts.insert(0, value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in imported:
                yield use.lineno, ".".join([imported[value.id], *parts])
