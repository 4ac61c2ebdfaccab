"""Hyperparameter spaces: constants and search specs at any depth of nested mappings and lists.

A mapping with a ``type`` is a spec (``const``, ``int``, ``double``, ``log``, ``categorical``);
every other mapping or list is a container, and every other value a constant.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from zerolab.errors import ConfigError
from zerolab.schema.space import (
    MAX_TRIALS,
    Space,
    needs_search,
    space_problems,
    space_warnings,
)
from zerolab.schema.specs import SPECS, is_spec

__all__ = [
    "MAX_TRIALS",
    "SPECS",
    "extremes",
    "grid_points",
    "grid_size",
    "is_spec",
    "needs_search",
    "sample_hyperparameters",
    "space_problems",
    "space_warnings",
]


def sample_hyperparameters(space: Mapping[str, Any], rng: Random) -> dict[str, Any]:
    """Draw one value for every spec of a space.

    Args:
        space: Hyperparameters as in the file.
        rng: Random generator; the same state gives the same sample.

    Returns:
        The space with values instead of specs; leaves that do not exist are left out.

    Raises:
        ConfigError: If a spec is invalid.

    Example:
        >>> from random import Random
        >>> space = {"width": {"type": "int", "minval": 8, "maxval": 64}, "layers": 2}
        >>> sample = zerolab.config.sample_hyperparameters(space, Random(0))
        >>> 8 <= sample["width"] <= 64, sample["layers"]
        (True, 2)
    """
    return Space(space).sample(rng)


def grid_points(space: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of the points of a space.

    Args:
        space: Hyperparameters as in the file; every range has a ``count``.

    Returns:
        One mapping for each combination, in sorted order of names; the last name varies fastest.

    Raises:
        ConfigError: If a spec is invalid, or a range has no ``count``.

    Example:
        >>> space = {"lr": {"type": "categorical", "vals": [0.1, 0.01]}, "layers": 2}
        >>> zerolab.config.grid_points(space)
        [{'lr': 0.1, 'layers': 2}, {'lr': 0.01, 'layers': 2}]
    """
    problems = space_problems(space, grid=True)
    if problems:
        raise ConfigError("hyperparameters", problems)
    return list(Space(space).grid())


def grid_size(space: Mapping[str, Any]) -> int:
    """Return the number of points of a grid.

    Args:
        space: Hyperparameters as in the file, already validated; every range has a ``count``.
    """
    return Space(space).grid_size()


def extremes(space: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return samples that reach the ends of every range and every choice (the first 1,000).

    Args:
        space: Hyperparameters as in the file, already validated.
    """
    return list(Space(space).extremes())
