"""Candidate points for the next trial: random, or near good ones.

Points are rows of coordinates, as in :mod:`zerolab.extensions.searcher_tpe.parzen`. Every random
number comes from the trial's own generator, a fixed number of them for each candidate.
"""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from zerolab.schema.space import Dimension

__all__ = ["box_muller", "perturb", "reflect", "sample_uniform", "snap_rows", "to_rows", "uniform"]

Points = NDArray[np.float64]

_STAYS = 0.5
"""Fraction of the coordinates that a perturbation leaves unchanged."""
_WIDTHS = (0.2, 0.08, 0.03)
"""Widths of the perturbations, used in turn; for integers at least this number of steps:"""
_STEPS = 0.7
_CHANGES = 0.3
"""Probability that a perturbed category is drawn again."""
_DIGITS = 9
"""Decimals of a coordinate: logarithms and cosines differ between machines in the sixteenth."""


def to_rows(points: Sequence[Sequence[float | None]], dimensions: int) -> Points:
    """Return points as rows, with NaN for a leaf that does not exist.

    Args:
        points: N points of D coordinates each.
        dimensions: D.

    Returns:
        (N, D)
    """
    return np.array(points, dtype=float).reshape(len(points), dimensions)


def uniform(rng: Random, *shape: int) -> NDArray[np.float64]:
    """Draw random numbers in [0, 1)."""
    draw = rng.random
    return np.array([draw() for _ in range(math.prod(shape))]).reshape(shape)


def box_muller(radii: NDArray[np.float64], angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return standard normal deviates from pairs of uniform numbers (basic Box-Muller)."""
    deviates: NDArray[np.float64] = np.sqrt(-2 * np.log(1 - radii)) * np.cos(2 * np.pi * angles)
    return deviates


def reflect(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fold numbers back into the unit interval."""
    values = values % 2.0
    folded: NDArray[np.float64] = np.where(values > 1.0, 2.0 - values, values)
    return folded.round(_DIGITS)


def sample_uniform(dimensions: Sequence[Dimension], count: int, rng: Random) -> Points:
    """Draw points of the whole space.

    Returns:
        (count, D); every leaf has a coordinate, whether it exists or not.
    """
    drawn = uniform(rng, count, len(dimensions))
    for index, dimension in enumerate(dimensions):
        if dimension.kind == "categorical":
            drawn[:, index] = np.floor(drawn[:, index] * dimension.size)
    return drawn


def perturb(dimensions: Sequence[Dimension], points: Points, count: int, rng: Random) -> Points:
    """Perturb points: about half of the coordinates of each.

    Args:
        dimensions: Dimensions of the space; D of them.
        points: (N, D), of which each candidate takes one.
        count: Number of candidates.
        rng: The new trial's own generator.

    Returns:
        (count, D); every leaf has a coordinate, whether it exists or not.
    """
    bases = np.floor(uniform(rng, count) * len(points)).astype(int)
    starts: Points = points[bases]  # (count, D)
    stays, radii, angles, fresh = uniform(rng, 4, count, len(dimensions))
    widths = np.resize(np.array(_WIDTHS), count)
    deviates = box_muller(radii, angles)
    for index, dimension in enumerate(dimensions):
        start, new = starts[:, index], fresh[:, index]
        if dimension.kind == "categorical":
            new = np.floor(new * dimension.size)
            changes = radii[:, index] < _CHANGES
            shifted = np.where(changes, new, start)
        else:
            least = _STEPS / dimension.size if dimension.kind == "int" else 0.0
            shifted = reflect(start + np.maximum(widths, least) * deviates[:, index])
        shifted = np.where(stays[:, index] < _STAYS, start, shifted)
        starts[:, index] = np.where(np.isnan(start), new, shifted)
    return starts


def snap_rows(dimensions: Sequence[Dimension], points: Points) -> Points:
    """Move coordinates to the centres of their cells, with NaN for leaves that do not exist.

    Vectorized form of :meth:`zerolab.schema.space.Space.snap`.
    """
    rows = points.copy()
    for index, dimension in enumerate(dimensions):
        if dimension.kind == "int":
            cells = np.floor(rows[:, index] * dimension.size).clip(0, dimension.size - 1)
            rows[:, index] = (cells + 0.5) / dimension.size
        for parent, categories in dimension.when:
            rows[~np.isin(rows[:, parent], list(categories)), index] = np.nan
    return rows
