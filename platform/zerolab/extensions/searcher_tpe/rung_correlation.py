"""Trust in rungs: how well short trainings rank trials like longer ones.

A trial that reached a rung was usually validated at the lower ones, too. Pairs of trials with
values at two lengths show whether the shorter length orders them like the longer one.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["RungCorrelation"]

_PRIOR, _STRENGTH = 0.85, 0.5
"""Prior share of pairs that the lowest rung ranks correctly; weight of a prior."""
_NOTHING, _FULL = 0.5, 0.7
"""Shares of correct pairs at which a rung is not trusted at all (chance level), and fully."""
_NEWEST = 64
"""Maximum number of trials of a rung that are compared, newest first."""


class RungCorrelation:
    """Values of all trials at every rung, and the trust in each rung.

    Args:
        rungs: Number of rungs.
    """

    def __init__(self, rungs: int) -> None:
        self._values: list[dict[int, float]] = [{} for _ in range(rungs)]
        self._trust = [1.0] * rungs
        self._is_stale = False

    def values(self) -> list[Mapping[int, float]]:
        """Return for each rung the values by trial id; values that are not finite are infinite."""
        return [*self._values]

    def record(self, rung: int, trial_id: int, value: float) -> None:
        """Record a trial's value at a rung, judged or intermediate."""
        self._values[rung][trial_id] = value
        self._is_stale = self._is_stale or rung > 0

    def remapped(self, stay: Mapping[int, int], rungs: int) -> "RungCorrelation":
        """Return the values of the rungs that stay, under new numbers.

        Args:
            stay: Former rung to new rung.
            rungs: New number of rungs.
        """
        other = RungCorrelation(rungs)
        for rung, now in stay.items():
            for trial_id, value in self._values[rung].items():
                other.record(now, trial_id, value)
        return other

    def remove_trial(self, trial_id: int) -> None:
        """Drop all values of a trial."""
        for values in self._values:
            values.pop(trial_id, None)
        self._is_stale = True

    def trust(self) -> list[float]:
        """Return the trust in each rung, from 0 to 1; that of the last one is 1.

        The trust in a rung is the least agreement with any higher one. Without trials to compare,
        it is expected to be as good as the rung below it: where the first two rungs rank at chance
        level, the third gets fewer trials until its ranking is confirmed. Rungs below an untrusted
        one are untrusted, too, as no trial would be promoted through it.
        """
        if self._is_stale:
            self._is_stale = False
            top = len(self._values) - 1
            shares, expected = [], _PRIOR
            for k in range(top):
                # The neighbour has the most pairs. A rung that agrees with it and not with the
                # final length still promotes the wrong trials: hence the least of all agreements.
                agreement = [self._share(k, k + 1, expected)]
                expected = min(max(agreement[0], _NOTHING), _PRIOR)
                agreement += [self._share(k, m, expected) for m in range(k + 2, top + 1)]
                shares.append(min(agreement))
            grown = [(share - _NOTHING) / (_FULL - _NOTHING) for share in shares]
            self._trust = [*(min(max(agreement, 0.0), 1.0) for agreement in grown), 1.0]
            for k in range(top - 1, 0, -1):
                if self._trust[k] == 0:
                    self._trust[k - 1] = 0.0
        return self._trust

    def _share(self, lower: int, higher: int, expected: float) -> float:
        """Return the share of pairs that two rungs order alike, shrunk toward ``expected``.

        A pair's weight is its distance in ranks at the lower rung: promoted trials are alike, so
        their order is expected to change. The sum of weights grows with the number of trials, not
        of pairs.
        """
        values = self._values[lower]
        both = [trial_id for trial_id in self._values[higher] if trial_id in values][-_NEWEST:]
        if len(both) < 2:
            return expected
        all_short = np.sort(np.array(list(values.values())))
        short = np.array([values[trial_id] for trial_id in both])
        apart = _differences(np.searchsorted(all_short, short) / len(all_short))
        order = np.sign(_differences(np.array([self._values[higher][i] for i in both])))
        weights = np.abs(apart) * (order != 0) / (len(both) - 1)
        agreeing = float((weights * (np.sign(apart) == order)).sum())
        return (agreeing + expected * _STRENGTH) / (float(weights.sum()) + _STRENGTH)


def _differences(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the differences of all pairs; those of two infinite values are 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart: NDArray[np.float64] = values[:, None] - values[None, :]
    apart[np.isnan(apart)] = 0.0
    return apart
