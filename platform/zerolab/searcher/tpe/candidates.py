"""Places where the next trial might lie: anywhere, or a short way from good ones.

Points are rows of coordinates, as in :mod:`zerolab.searcher.tpe.parzen`. Every random number comes
from the trial's own generator, a fixed number of them for each candidate.
"""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from zerolab.schema.space import Dimension

__all__ = ["anywhere", "moved", "normal", "reflected", "rows_of", "snapped", "uniform"]

Points = NDArray[np.float64]

_STAYS = 0.5
"""Part of the coordinates that a move leaves as they are."""
_WIDTHS = (0.2, 0.08, 0.03)
"""How far moves go, in turn; a whole number's go at least so many steps:"""
_STEPS = 0.7
_CHANGES = 0.3
"""Part of the moves of a category that go to any."""
_DIGITS = 9
"""Decimals of a coordinate: logarithms and cosines of machines differ in the sixteenth."""


def rows_of(points: Sequence[Sequence[float | None]], dimensions: int) -> Points:
    """Points as rows; NaN for a leaf that does not exist.

    Args:
        points: N of them, D coordinates each.
        dimensions: D.

    Returns:
        (N, D)
    """
    return np.array(points, dtype=float).reshape(len(points), dimensions)


def uniform(rng: Random, *shape: int) -> NDArray[np.float64]:
    """Random numbers from 0 to below 1."""
    draw = rng.random
    return np.array([draw() for _ in range(math.prod(shape))]).reshape(shape)


def normal(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal numbers from pairs of uniform ones, which are not given back."""
    deviates: NDArray[np.float64] = np.sqrt(-2 * np.log(1 - one)) * np.cos(2 * np.pi * other)
    return deviates


def reflected(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fold numbers back into the unit interval."""
    values = values % 2.0
    folded: NDArray[np.float64] = np.where(values > 1.0, 2.0 - values, values)
    return folded.round(_DIGITS)


def anywhere(dimensions: Sequence[Dimension], count: int, rng: Random) -> Points:
    """Draw points of the whole space.

    Returns:
        (count, D); every leaf has a coordinate, whether it exists or not.
    """
    drawn = uniform(rng, count, len(dimensions))
    for index, dimension in enumerate(dimensions):
        if dimension.kind == "categorical":
            drawn[:, index] = np.floor(drawn[:, index] * dimension.size)
    return drawn


def moved(dimensions: Sequence[Dimension], points: Points, count: int, rng: Random) -> Points:
    """Move points a little: about half of the coordinates of each.

    Args:
        dimensions: Of the space; D of them.
        points: (N, D), of which each candidate takes one.
        count: How many candidates.
        rng: The new trial's own randomness.

    Returns:
        (count, D); every leaf has a coordinate, whether it exists or not.
    """
    bases = np.floor(uniform(rng, count) * len(points)).astype(int)
    starts: Points = points[bases]  # (count, D)
    stays, one, other, fresh = uniform(rng, 4, count, len(dimensions))
    widths = np.resize(np.array(_WIDTHS), count)
    away = normal(one, other)
    for index, dimension in enumerate(dimensions):
        start, new = starts[:, index], fresh[:, index]
        if dimension.kind == "categorical":
            new = np.floor(new * dimension.size)
            goes = one[:, index] < _CHANGES
            there = np.where(goes, new, start)
        else:
            least = _STEPS / dimension.size if dimension.kind == "int" else 0.0
            there = reflected(start + np.maximum(widths, least) * away[:, index])
        there = np.where(stays[:, index] < _STAYS, start, there)
        starts[:, index] = np.where(np.isnan(start), new, there)
    return starts


def snapped(dimensions: Sequence[Dimension], points: Points) -> Points:
    """Move coordinates to the middles of their cells, and leave out what does not exist.

    As :meth:`zerolab.schema.space.Space.snap`, for all rows at once.
    """
    rows = points.copy()
    for index, dimension in enumerate(dimensions):
        if dimension.kind == "int":
            cells = np.floor(rows[:, index] * dimension.size).clip(0, dimension.size - 1)
            rows[:, index] = (cells + 0.5) / dimension.size
        for parent, wanted in dimension.when:
            rows[~np.isin(rows[:, parent], list(wanted)), index] = np.nan
    return rows
