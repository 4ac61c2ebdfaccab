"""Checks of values that every configuration file must pass, before anything else reads it.

Files travel as JSON and are stored as text. The check does not recurse, so that later code may
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

__all__ = ["MAX_DEPTH", "is_text", "json_value_problems", "key_problems", "to_json_values"]

MAX_DEPTH = 64
"""Maximum nesting of mappings and lists."""

_MAX_PROBLEMS = 20


def to_json_values(value: Any) -> Any:
    """Convert Python values to types of a configuration file.

    Mappings (OmegaConf's too) become dicts, sequences and arrays lists, paths text, enumerations
    their values, and numbers of numpy and torch, Decimals and Fractions become Python's. Other
    values are unchanged and checked later.

    Args:
        value: A configuration, or a part of it.

    Example:
        >>> to_json_values({"betas": (0.9, 0.95), "nvme_path": pathlib.Path("/tmp")})
        {'betas': [0.9, 0.95], 'nvme_path': '/tmp'}
    """
    return _to_json_value(value, ())


def _to_json_value(value: Any, outer: tuple[int, ...]) -> Any:
    if id(value) in outer or len(outer) > MAX_DEPTH:
        return value  # rejected later as nested too deep
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
        return {key: _to_json_value(item, inside) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return [_to_json_value(item, inside) for item in value]
    return value


def json_value_problems(content: Mapping[str, Any]) -> list[str]:
    """Return a message for each value that is too deep, not finite or not storable text.

    Args:
        content: Content of a file.
    """
    problems: list[str] = []
    for path, value in _values(content):
        if len(path) > MAX_DEPTH:
            prefix = f"{dotted(path[:3])}..."
            return [f"{prefix}: must be nested at most {MAX_DEPTH} deep, got more; flatten it"]
        problem = _problem(value)
        if problem:
            problems.append(f"{dotted(path) or 'file'}: {problem}")
        if len(problems) == _MAX_PROBLEMS:
            break
    return problems


def key_problems(content: Any, name: str) -> list[str]:
    r"""Return a message for each key with control characters, at any depth.

    Args:
        content: A block of a file, checked by :func:`json_value_problems`.
        name: Name of the block.

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
    return problems[:_MAX_PROBLEMS]


def _values(content: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every key and value with its path, parents before children."""
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
    """Whether a string is valid UTF-8; arguments and file names may hold any bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
