"""Where the next trial should lie: what is known of the space, and a draw from it."""

import math
from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from zerolab.schema.space import Point, Space
from zerolab.searcher.tpe.ladder import Ladder
from zerolab.searcher.tpe.parzen import Mixture

__all__ = ["propose"]

_UNIFORM = 0.05
"""Part of the trials that are drawn from the whole space."""
_ENOUGH = 8
"""Finite values that a rung must have before it is learned from."""
_GOOD, _MOST_GOOD = 0.1, 25
_MOST_BAD = 100
_CANDIDATES = 24
_DIGITS = 9
"""Decimals in which gains are compared."""


def propose(
    space: Space,
    ladder: Ladder,
    points: Mapping[int, Point],
    pending: Sequence[int],
    rng: Random,
) -> Point | None:
    """Draw a promising point.

    Args:
        space: Where points may lie.
        ladder: What is known of trials.
        points: Where the trials lie, by id.
        pending: Trials that nothing is known of yet.
        rng: The new trial's own randomness.

    Returns:
        A coordinate for each dimension, or None when the point should be any of the space.
    """
    if rng.random() < _UNIFORM or not space.dimensions:
        return None
    known = ladder.best_known(_ENOUGH)
    if known is None:
        return None
    count = min(math.ceil(_GOOD * len(known)), _MOST_GOOD)
    rest = [*known[count:], *ladder.left_behind(known)]
    if len(rest) > _MOST_BAD:
        rest = rng.sample(rest, _MOST_BAD)
    good = Mixture(space.dimensions, _array([points[i] for i in known[:count]]))
    bad = Mixture(space.dimensions, _array([points[i] for i in [*rest, *pending]]))
    candidates = [space.snap(good.draw(rng)) for _ in range(_CANDIDATES)]
    at = _array(candidates)
    gain = good.log_density(at) - bad.log_density(at)
    # Of those that are alike the first, on machines too whose sums differ in their last digits.
    return candidates[int(gain.round(_DIGITS).argmax())]


def _array(points: Sequence[Point]) -> NDArray[np.float64]:
    rows = [[math.nan if at is None else at for at in point] for point in points]
    return np.array(rows, dtype=float).reshape(len(rows), -1)
