"""What every value of a file must be, whatever it means: it travels as JSON and is stored as text.

Looked at before anything else reads the file, without recursion, so that what comes after may
trust the depth.
"""

import enum
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from zerolab.contract.names import text_problem
from zerolab.schema.section import Path, dotted

__all__ = ["MAX_DEPTH", "is_text", "key_problems", "plain_problems", "to_plain"]

MAX_DEPTH = 64
"""Most blocks and lists inside one another."""

_MOST_PROBLEMS = 20


def to_plain(value: Any) -> Any:
    """Convert values of Python code to those that a file holds.

    Mappings (OmegaConf's too) become dicts, sequences and arrays lists, paths text, enumerations
    their values, numbers of numpy and torch, Decimals and Fractions Python's. Everything else
    stays, to be checked later.

    Args:
        value: A configuration, or a part of it.

    Example:
        >>> to_plain({"betas": (0.9, 0.95), "nvme_path": pathlib.Path("/tmp")})
        {'betas': [0.9, 0.95], 'nvme_path': '/tmp'}
    """
    return _converted(value, ())


def _converted(value: Any, outer: tuple[int, ...]) -> Any:
    if id(value) in outer or len(outer) > MAX_DEPTH:
        return value  # refused as nested too deep
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Decimal | Fraction):
        value = float(value)
    if type(value).__module__.partition(".")[0] in {"numpy", "torch"} and hasattr(value, "tolist"):
        return value.tolist()
    inside = (*outer, id(value))
    if isinstance(value, Mapping):
        return {key: _converted(item, inside) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return [_converted(item, inside) for item in value]
    return value


def plain_problems(content: Mapping[str, Any]) -> list[str]:
    """Name the values that no file may hold: too deep, not finite, or text that cannot be stored.

    Args:
        content: A file.
    """
    problems: list[str] = []
    for path, value in _values(content):
        if len(path) > MAX_DEPTH:
            place = f"{dotted(path[:3])}..."
            return [f"{place}: must be nested at most {MAX_DEPTH} deep, got more; flatten it"]
        problem = _problem(value)
        if problem:
            problems.append(f"{dotted(path) or 'file'}: {problem}")
        if len(problems) == _MOST_PROBLEMS:
            break
    return problems


def key_problems(content: Any, name: str) -> list[str]:
    r"""Name the keys, at any depth, with control characters, which nothing can show.

    Args:
        content: A block of a file that :func:`plain_problems` has checked.
        name: Of the block.

    Example:
        >>> key_problems({"net": {"depth": 1, "\x1b[2J": 1}}, "hyperparameters")
        ["hyperparameters.net: names must have no control characters, got '\\x1b[2J'"]
    """
    problems = []
    waiting: list[tuple[Path, Any]] = [((name,), content)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Mapping):
            wrong = filter(None, (text_problem(str(key)) for key in value))
            problems += [f"{dotted(path)}: names {problem}" for problem in wrong]
            waiting += [((*path, str(key)), inner) for key, inner in value.items()][::-1]
        elif isinstance(value, list):
            waiting += [((*path, index), inner) for index, inner in enumerate(value)][::-1]
    return problems[:_MOST_PROBLEMS]


def _values(content: Any) -> Iterator[tuple[Path, Any]]:
    """Every key and value with its place, those above before those inside."""
    waiting: list[tuple[Path, Any]] = [((), content)]
    while waiting:
        path, value = waiting.pop()
        if len(path) > MAX_DEPTH or not isinstance(value, Mapping | list):
            yield path, value
        elif isinstance(value, Mapping):
            yield from ((path, key) for key in value if isinstance(key, str))
            waiting += [((*path, str(key)), inner) for key, inner in value.items()][::-1]
        else:
            waiting += [((*path, index), inner) for index, inner in enumerate(value)][::-1]


def _problem(value: Any) -> str | None:
    if isinstance(value, Iterator):
        return f"must be a list, got a {type(value).__name__}, which can be read once; use list()"
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number, got {value}"
    if isinstance(value, str):
        if "\0" in value:
            return f"must hold no NUL character, got {value[:50]!r}"
        if not is_text(value):
            return f"must be text of whole characters (UTF-8), got {value[:50]!r}"
    return None


def is_text(value: str) -> bool:
    """Whether UTF-8 can say it: an argument, or a file's name, may hold any bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
