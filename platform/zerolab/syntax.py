"""Python's modules as files and text: nothing is imported."""

import ast
import posixpath
from collections.abc import Callable, Iterator

__all__ = [
    "imported_files", "imported_modules", "module_paths", "parsed", "relative_import_problem",
    "syntax_problem",
]  # fmt: skip

_MOST_FILES = 50


def module_paths(name: str) -> tuple[str, ...]:
    """Return where a module's source may lie, in the order in which Python looks for it.

    Args:
        name: With dots, as in an import.

    Returns:
        Paths below a folder of the module search path, e.g. ``a/b/__init__.py`` and ``a/b.py``.
    """
    base = name.replace(".", "/")
    return f"{base}/__init__.py", f"{base}.py"


def parsed(source: bytes) -> ast.Module | None:
    """Read a module.

    Args:
        source: Its text.

    Returns:
        None where this Python cannot read it: another one may run it, and this one is told then.
    """
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last: nested too deep
        return None


def syntax_problem(source: bytes, path: str) -> str | None:
    """Describe the syntax error of a file; None where this Python can read it.

    Args:
        source: Its text.
        path: Its name, for the message.

    Returns:
        E.g. ``model_def.py:12: SyntaxError: expected ':' (in: def f())``.
    """
    try:
        ast.parse(source)
    except SyntaxError as error:
        line = (error.text or "").strip()
        shown = f" (in: {line})" if line else ""
        return f"{path}:{error.lineno or 1}: {type(error).__name__}: {error.msg}{shown}"
    except ValueError as error:  # a NUL in older Pythons
        return f"{path}: SyntaxError: {error}"
    except (RecursionError, MemoryError):
        return None
    return None


def imported_files(
    entry: str, read: Callable[[str], bytes | None], folders: tuple[str, ...] = ("",)
) -> Iterator[tuple[str, bytes]]:
    """Yield a file and those that it imports at its top, directly or not: path and source.

    Args:
        entry: Path of the first file.
        read: Reads a file by its path; None when there is none.
        folders: In which modules are looked for.
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
    """Yield modules that a file imports at its top, and names from modules, maybe modules too."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def relative_import_problem(source: bytes, path: str) -> str | None:
    """Describe a relative import at the top of a file that is in no package; None without one.

    Args:
        source: Its text.
        path: Its name, for the message.
    """
    tree = parsed(source)
    for node in tree.body if tree else ():
        if isinstance(node, ast.ImportFrom) and node.level:
            names = ", ".join(
                f"{alias.name} as {alias.asname}" if alias.asname else alias.name
                for alias in node.names
            )
            got = f"from {'.' * node.level}{node.module or ''} import {names}"
            meant = f"from {node.module} import {names}" if node.module else f"import {names}"
            told = f"a relative import needs a package, got `{got}`; write `{meant}`"
            return f"{path}:{node.lineno}: {told}"
    return None
