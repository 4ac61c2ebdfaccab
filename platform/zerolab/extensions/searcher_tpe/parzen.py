"""Parzen estimator: density of the good trials relative to the others.

Shapes: G good points, B bad ones, M of either, N candidates, D dimensions. A point has a coordinate
for each dimension: in the unit interval for numbers, the index for categories, NaN for a leaf that
does not exist.

References:
    Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011, section 4: the two
    densities l and g, and the ratio that is maximised. Here every dimension of a point belongs to
    one kernel, so that the densities keep good combinations together.
"""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from zerolab.extensions.searcher_tpe.candidates import box_muller, reflect, uniform
from zerolab.schema.space import Dimension

__all__ = ["Mixture"]

Points = NDArray[np.float64]

_WIDTH = 0.1
"""Width of a kernel around a single point, in the unit interval."""


class Mixture:
    """Kernels around points, plus one flat kernel.

    Args:
        dimensions: Dimensions of the space; D of them.
        points: (M, D).
    """

    def __init__(self, dimensions: Sequence[Dimension], points: Points) -> None:
        self._points = points  # (M, D)
        count = len(points)
        self._is_choice = np.array([d.kind == "categorical" for d in dimensions], dtype=bool)
        self._sizes = np.array([max(d.size, 1) for d in dimensions], dtype=float)  # (D,)
        width = _WIDTH * (count + 1) ** (-1 / (len(dimensions) + 4))
        steps = np.array([0.5 / d.size if d.kind == "int" else 0.0 for d in dimensions])
        self._widths = np.maximum(width, steps)  # (D,)

    def draw(self, rng: Random, count: int) -> Points:
        """Draw points: a kernel for each, then each coordinate from it.

        Returns:
            (count, D); every leaf has a coordinate, whether it exists or not.
        """
        num_points, dimensions = len(self._points), len(self._sizes)
        kernels = np.floor(uniform(rng, count) * (num_points + 1)).astype(int)
        flat = np.full((1, dimensions), np.nan)  # the flat kernel
        centres = np.concatenate([self._points, flat])[kernels]  # (count, D)
        first, second, uniform_values = uniform(rng, 3, count, dimensions)
        near = reflect(centres + self._widths * box_muller(first, second))
        same = first < num_points / (self._sizes + num_points)
        choices = np.where(
            same & ~np.isnan(centres), centres, np.floor(uniform_values * self._sizes)
        )
        numbers = np.where(np.isnan(centres), uniform_values, near)
        drawn: Points = np.where(self._is_choice, choices, numbers)
        return drawn

    def log_density(self, at: Points) -> NDArray[np.float64]:
        """Return the logarithm of the density, up to a constant.

        Args:
            at: (N, D).

        Returns:
            (N,)
        """
        count = len(self._points)
        flat = np.where(self._is_choice, 1 / self._sizes, 1.0)  # (D,)
        exists = ~np.isnan(at)  # (N, D)
        flat_density: NDArray[np.float64] = np.where(exists, np.log(flat), 0.0).sum(
            axis=1
        )  # (N,): the flat kernel
        if not count:
            return flat_density
        logs = np.zeros((len(at), count))  # (N, M)
        for index in range(at.shape[1]):
            x, c = at[:, index, None], self._points[None, :, index]
            if self._is_choice[index]:
                same = np.where(x == c, 1 + count, 1)
                values = np.log(same / (self._sizes[index] + count))
            else:
                values = _log_reflected(x, c, self._widths[index])
            values = np.where(np.isnan(c), math.log(flat[index]), values)
            logs += np.where(np.isnan(x), 0.0, values)
        logs = np.concatenate([logs, flat_density[:, None]], axis=1)
        # Log-sum-exp over the kernels, with the maximum factored out against underflow.
        peak: NDArray[np.float64] = logs.max(axis=1)
        total: NDArray[np.float64] = np.exp(logs - peak[:, None]).sum(axis=1)
        density: NDArray[np.float64] = peak + np.log(total / (count + 1))
        return density


def _log_reflected(x: Points, c: Points, width: float) -> Points:
    """A normal density around ``c``, folded back at 0 and 1."""
    scale = -0.5 / width**2
    near = np.exp(scale * (x - c) ** 2)
    folded = near + np.exp(scale * (x + c) ** 2) + np.exp(scale * (2 - x - c) ** 2)
    values: Points = np.log(folded + 1e-300) - math.log(width * math.sqrt(2 * math.pi))
    return values
