"""Values of all rungs on one scale, whatever a metric is and however it changes as trials train.

At the lowest rung values are moved and stretched so that their median and best tenth lie where
those of a normal distribution do; at any other one, where those trials lay one rung below that came
to it. So who was promoted has scores as good as its promotion said, outliers weigh no more than the
worst of the others, and where two rungs say the same they give the same scores.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scores", "on_one_scale"]

Scores = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Ids of the trials of a rung, best first, and their scores; (N,) each."""

_QUANTILES = (0.1, 0.5)
"""What two scales have in common."""
_FEWEST = 5
"""With fewer finite values, or where they tie, only their order counts."""
_LOWER = 1.5
"""How far below the best of the scale a score may lie."""
_DIGITS = 12
"""Decimals of a score; sums differ in the sixteenth from machine to machine."""


def on_one_scale(rungs: Sequence[Mapping[int, float]]) -> list[Scores]:
    """Score every trial at every rung; smaller is better.

    Args:
        rungs: For each, trial id to value: infinity for what is not a finite number, and smaller is
            better. Equal values have equal scores.
    """
    scored: list[Scores] = []
    below: dict[int, float] = {}
    for values in rungs:
        ids = np.fromiter(values.keys(), np.int64, len(values))
        found = np.fromiter(values.values(), np.float64, len(values))
        order = np.lexsort((ids, found))
        ids, found = ids[order], found[order]
        if not below:
            scale = _deviates(len(ids))
        else:  # who was not seen below, for it failed on the way, was as bad as anyone there
            worst = max(below.values())
            scale = np.sort(np.array([below.get(trial_id, worst) for trial_id in ids.tolist()]))
        scores = _laid(found, scale)
        scored.append((ids, scores))
        below = dict(zip(ids.tolist(), scores.tolist(), strict=True)) or below
    return scored


def _laid(values: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.float64]:
    """Lay sorted values on a scale of as many sorted scores."""
    finite = int(np.isfinite(values).sum())
    laid = scale.copy()
    if finite >= _FEWEST:
        small = values[:finite] / 4  # so that no difference of two is infinite
        best, middle = np.quantile(small, _QUANTILES)
        low, centre = np.quantile(scale[:finite], _QUANTILES)
        if middle > best:
            with np.errstate(over="ignore"):  # what lies so far away is cut off
                on_line = centre + (small - middle) * (centre - low) / (middle - best)
            laid[:finite] = on_line.clip(scale[0] - _LOWER, scale[-1])
            laid[finite:] = scale[-1]
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: NDArray[np.float64] = np.bincount(group, laid, len(counts)) / counts
    return means.round(_DIGITS)[group]


@lru_cache(maxsize=64)
def _deviates(count: int) -> NDArray[np.float64]:
    """Normal deviates of so many ranks, smallest first."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((rank + 0.5) / count) for rank in range(count)])
