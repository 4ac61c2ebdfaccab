"""Objective: a space, and the learning curve of every configuration in it."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerolab.schema.space import Space

EPOCHS = 27
"""Length of a full training."""

Curve = NDArray[np.float64]  # (EPOCHS,): the value after each epoch; NaN once it has diverged


@dataclass(frozen=True)
class Objective:
    """One problem; smaller values are better."""

    name: str
    space: Mapping[str, Any]
    curve: Callable[[dict[str, Any]], Curve]
    """Without noise."""
    noise: Callable[[Random, int], float]
    """Added to what is seen after an epoch, from 1."""
    biased: bool = False
    """Whether short trainings see another function, so that only the longest ones count."""
    minimum: float | None = None
    """The best value at full length, where it is known."""

    @functools.cached_property
    def scale(self) -> tuple[float, float]:
        """The best value, and the median of random configurations, at full length."""
        rng = Random(f"scale of {self.name}")
        space = Space(self.space)
        points = [space.point(rng) for _ in range(2000)]
        ends = [self._end(space, point) for point in points]
        best = self.minimum if self.minimum is not None else self._descend(space, points, ends, rng)
        return best, float(np.median(ends))

    def _end(self, space: Space, point: Any) -> float:
        value = float(self.curve(space.hparams(point))[-1])
        return value if math.isfinite(value) else math.inf

    def _descend(self, space: Space, points: list[Any], ends: list[float], rng: Random) -> float:
        """The best value that a local search finds, from the ten best random points."""
        lowest = math.inf
        for start in np.argsort(ends, kind="stable")[:10]:
            at, value, width = points[start], ends[start], 0.2
            for _ in range(600):
                other = space.point(rng)
                moved = [
                    here if there is None or (here is not None and rng.random() < 0.5)
                    else there if here is None or kind == "categorical"
                    else min(max(here + rng.gauss(0, width), 0.0), 1.0)
                    for here, there, kind in zip(
                        at, other, [d.kind for d in space.dimensions], strict=True
                    )
                ]  # fmt: skip
                point = space.snap(moved)
                tried = self._end(space, point)
                if tried < value:
                    at, value, width = point, tried, min(width * 1.5, 0.3)
                else:
                    width = max(width * 0.97, 1e-3)
            lowest = min(lowest, value)
        return lowest
