"""Python's modules as files and text: nothing is imported."""

import ast

__all__ = ["module_paths", "parsed"]


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
