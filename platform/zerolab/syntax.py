"""Paths of the source files of Python modules."""

__all__ = ["module_paths"]


def module_paths(name: str) -> tuple[str, ...]:
    """Return the possible paths of a module's source, in Python's search order.

    Args:
        name: Dotted name, as in an import.

    Returns:
        Paths below a folder of the module search path, e.g. ``a/b/__init__.py`` and ``a/b.py``.
    """
    base = name.replace(".", "/")
    return f"{base}/__init__.py", f"{base}.py"
