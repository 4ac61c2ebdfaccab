"""Values of all rungs on one scale, whatever a metric is and however it changes as trials train.

At the lowest rung values are moved and stretched so that their median and best tenth lie where
those of a normal distribution do; at any other one, where those trials lay one rung below that came
to it. So who was promoted has scores as good as its promotion said, outliers weigh no more than the
worst of the others, and where two rungs say the same they give the same scores. Where trials were
all alike one rung below, as before anything is learned, normal deviates take the place of that.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scores", "on_one_scale"]

Array = NDArray[np.float64]

Scores = tuple[NDArray[np.int64], Array]
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
        scale = _expected(ids, found, below) if below else _deviates(len(ids))
        scores = _laid(found, scale)
        scored.append((ids, scores))
        below = dict(zip(ids.tolist(), scores.tolist(), strict=True)) or below
    return scored


def _expected(ids: NDArray[np.int64], values: Array, below: Mapping[int, float]) -> Array:
    """The scores that the trials of a rung had one rung below, smallest first.

    Who was not seen there failed on the way, and was as bad as anyone; or it reports only where it
    is judged, and was like all others.
    """
    scores = sorted(below.values())
    had = [below[trial_id] for trial_id in ids.tolist() if trial_id in below]
    silent = sum(
        trial_id not in below and math.isfinite(value)
        for trial_id, value in zip(ids.tolist(), values.tolist(), strict=True)
    )
    like_all = np.interp(_middles(silent), _middles(len(scores)), scores)
    failed = [scores[-1]] * (len(ids) - len(had) - silent)
    return np.sort(np.array([*had, *like_all, *failed]))


def _middles(count: int) -> Array:
    """The middles of so many equal parts of the unit interval."""
    middles: Array = (np.arange(count) + 0.5) / count
    return middles


def _laid(values: Array, scale: Array) -> Array:
    """Lay sorted values on a scale of as many sorted scores."""
    finite = int(np.searchsorted(values, np.inf))
    if finite > 1 and _common(scale[:finite])[0] == _common(scale[:finite])[1]:
        # Below they were all alike, so that they can only be told from each other here.
        spread = scale[0] + _deviates(finite)
        scale = np.concatenate([spread, scale[finite:].clip(spread[-1])])
    laid = scale.copy()
    if finite >= _FEWEST:
        small = values[:finite] / 4  # so that no difference of two is infinite
        (best, middle), (low, centre) = _common(small), _common(scale[:finite])
        if middle > best:
            with np.errstate(over="ignore"):  # what lies so far away is cut off
                on_line = centre + (small - middle) * (centre - low) / (middle - best)
            laid[:finite] = on_line.clip(scale[0] - _LOWER, scale[-1])
            laid[finite:] = scale[-1]
    group = np.concatenate([[0], np.cumsum(values[1:] != values[:-1])])[: len(values)]
    means = np.bincount(group, laid) / np.bincount(group)
    shared: Array = means.round(_DIGITS)[group]
    return shared


def _common(sorted_values: Array) -> tuple[float, float]:
    """The quantiles that two scales have in common, between neighbours in proportion."""
    places = (len(sorted_values) - 1) * np.array(_QUANTILES)
    low, middle = np.interp(places, np.arange(len(sorted_values)), sorted_values)
    return float(low), float(middle)


@lru_cache(maxsize=8)
def _deviates(count: int) -> Array:
    """Normal deviates of so many ranks, smallest first."""
    normal = NormalDist()
    below = [normal.inv_cdf((rank + 0.5) / count) for rank in range(count // 2)]
    return np.array([*below, *[0.0] * (count % 2), *(-each for each in reversed(below))])
