"""Source files of Python modules, read as text and never imported."""

import ast
import posixpath
from collections.abc import Callable, Iterator

from zerolab.syntax import module_paths

__all__ = [
    "imported_files", "imported_modules", "parsed", "relative_import_problem", "syntax_problem",
]  # fmt: skip

_MOST_FILES = 50


def parsed(source: bytes) -> ast.Module | None:
    """Parse a module's source.

    Args:
        source: Source of the module.

    Returns:
        The syntax tree, or None if this Python version cannot parse it; another version may run it.
    """
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last ones: nested too deep
        return None


def syntax_problem(source: bytes, path: str) -> str | None:
    """Describe the syntax error of a file; None if this Python version can parse it.

    Args:
        source: Source of the module.
        path: Path of the file, for the message.

    Returns:
        E.g. ``model_def.py:12: SyntaxError: expected ':' (in: def f())``.
    """
    try:
        ast.parse(source)
    except SyntaxError as error:
        line = (error.text or "").strip()
        shown = f" (in: {line})" if line else ""
        return f"{path}:{error.lineno or 1}: {type(error).__name__}: {error.msg}{shown}"
    except ValueError as error:  # a NUL character in older Python versions
        return f"{path}: SyntaxError: {error}"
    except (RecursionError, MemoryError):
        return None
    return None


def imported_files(
    entry: str, read: Callable[[str], bytes | None], folders: tuple[str, ...] = ("",)
) -> Iterator[tuple[str, bytes]]:
    """Yield path and source of a file and its imports at the top, recursively.

    Args:
        entry: Path of the first file.
        read: Reads a file by its path; None if it is missing.
        folders: Search path of modules.
    """
    waiting, seen = [entry], {entry}
    while waiting and len(seen) <= _MOST_FILES:
        path = waiting.pop(0)
        source = read(path)
        if source is None:
            continue
        yield path, source
        tree = parsed(source)
        for module in imported_modules(tree) if tree else ():
            for folder in folders:
                for name in module_paths(module):
                    file = posixpath.join(folder, name)
                    if file not in seen:
                        seen.add(file)
                        waiting.append(file)


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Yield modules that a file imports at its top, and names imported from them."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def relative_import_problem(source: bytes, path: str) -> str | None:
    """Describe a relative import at the top of a file without a package; None without one.

    Args:
        source: Source of the module.
        path: Path of the file, for the message.
    """
    tree = parsed(source)
    for node in tree.body if tree else ():
        if isinstance(node, ast.ImportFrom) and node.level:
            names = ", ".join(
                f"{alias.name} as {alias.asname}" if alias.asname else alias.name
                for alias in node.names
            )
            got = f"from {'.' * node.level}{node.module or ''} import {names}"
            correction = f"from {node.module} import {names}" if node.module else f"import {names}"
            problem = f"a relative import needs a package, got `{got}`; write `{correction}`"
            return f"{path}:{node.lineno}: {problem}"
    return None
