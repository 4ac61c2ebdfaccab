"""Normalization of the metrics of all rungs to one scale.

At the lowest rung values are shifted and scaled so that their median and best tenth match a normal
distribution. At every other rung they match the scores that the same trials had one rung below.
Promoted trials therefore keep the good scores of their promotion, outliers weigh no more than the
worst of the others, and equal rankings give equal scores. Where trials all tied one rung below, as
before anything is learned, normal deviates are used.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scores", "normalize_rungs"]

Array = NDArray[np.float64]

Scores = tuple[NDArray[np.int64], Array]
"""Ids of the trials of a rung, best first, and their scores; (N,) each."""

_QUANTILES = (0.1, 0.5)
"""Quantiles that two scales share."""
_FEWEST = 5
"""With fewer finite values, or with ties, only their order counts."""
_LOWER = 1.5
"""Maximum distance of a score below the best of the scale."""
_DIGITS = 12
"""Decimals of a score; sums differ between machines in the sixteenth."""


def normalize_rungs(rungs: Sequence[Mapping[int, float]]) -> list[Scores]:
    """Score every trial at every rung; smaller is better.

    Args:
        rungs: For each rung the values by trial id, infinity for values that are not finite. Equal
            values get equal scores.
    """
    scored: list[Scores] = []
    below: dict[int, float] = {}
    for values in rungs:
        ids = np.fromiter(values.keys(), np.int64, len(values))
        sorted_values = np.fromiter(values.values(), np.float64, len(values))
        order = np.lexsort((ids, sorted_values))
        ids, sorted_values = ids[order], sorted_values[order]
        scale = _scores_below(ids, sorted_values, below) if below else _normal_deviates(len(ids))
        scores = _map_to_scale(sorted_values, scale)
        scored.append((ids, scores))
        below = dict(zip(ids.tolist(), scores.tolist(), strict=True)) or below
    return scored


def _scores_below(ids: NDArray[np.int64], values: Array, below: Mapping[int, float]) -> Array:
    """Return the scores that the trials of a rung had one rung below, smallest first.

    A trial without a value there failed on the way, and gets the worst score; or it only reports
    where it is judged, and gets average scores.
    """
    scores = sorted(below.values())
    had = [below[trial_id] for trial_id in ids.tolist() if trial_id in below]
    silent = sum(
        trial_id not in below and math.isfinite(value)
        for trial_id, value in zip(ids.tolist(), values.tolist(), strict=True)
    )
    like_all = np.interp(_midpoints(silent), _midpoints(len(scores)), scores)
    failed = [scores[-1]] * (len(ids) - len(had) - silent)
    return np.sort(np.array([*had, *like_all, *failed]))


def _midpoints(count: int) -> Array:
    """Return the midpoints of equal parts of the unit interval."""
    middles: Array = (np.arange(count) + 0.5) / count
    return middles


def _map_to_scale(values: Array, scale: Array) -> Array:
    """Map sorted values to a scale of as many sorted scores."""
    finite = int(np.searchsorted(values, np.inf))
    if finite > 1 and _anchor_quantiles(scale[:finite])[0] == _anchor_quantiles(scale[:finite])[1]:
        # They tied one rung below: only this rung distinguishes them.
        spread = scale[0] + _normal_deviates(finite)
        scale = np.concatenate([spread, scale[finite:].clip(spread[-1])])
    laid = scale.copy()
    if finite >= _FEWEST:
        small = values[:finite] / 4  # so that no difference of two is infinite
        (best, middle), (low, centre) = _anchor_quantiles(small), _anchor_quantiles(scale[:finite])
        if middle > best:
            with np.errstate(over="ignore"):  # far outliers are clipped
                on_line = centre + (small - middle) * (centre - low) / (middle - best)
            laid[:finite] = on_line.clip(scale[0] - _LOWER, scale[-1])
            laid[finite:] = scale[-1]
    group = np.concatenate([[0], np.cumsum(values[1:] != values[:-1])])[: len(values)]
    means = np.bincount(group, laid) / np.bincount(group)
    shared: Array = means.round(_DIGITS)[group]
    return shared


def _anchor_quantiles(sorted_values: Array) -> tuple[float, float]:
    """Return the quantiles that two scales share, interpolated linearly."""
    positions = (len(sorted_values) - 1) * np.array(_QUANTILES)
    low, middle = np.interp(positions, np.arange(len(sorted_values)), sorted_values)
    return float(low), float(middle)


@lru_cache(maxsize=8)
def _normal_deviates(count: int) -> Array:
    """Return the expected normal deviates of ``count`` ranks, smallest first."""
    normal = NormalDist()
    below = [normal.inv_cdf((rank + 0.5) / count) for rank in range(count // 2)]
    return np.array([*below, *[0.0] * (count % 2), *(-deviate for deviate in reversed(below))])
