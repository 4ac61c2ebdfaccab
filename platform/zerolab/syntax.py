"""Reading Python's source as text: nothing is imported."""

import ast

__all__ = ["parsed"]


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
