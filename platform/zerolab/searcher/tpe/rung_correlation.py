"""How far short trainings tell what longer ones will: rungs that rank trials alike.

A trial that has come to a rung has been validated at the lower ones, too, unless its script reports
only where it is judged; so pairs of trials that are known at two lengths say whether the shorter
one orders them as the longer one does.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["Agreement"]

_PRIOR, _STRENGTH = 0.85, 0.5
"""Share of pairs that the lowest rung ranks right, before any was seen; weight of a belief."""
_NOTHING, _FULL = 0.5, 0.7
"""Shares at which a rung is not trusted at all, as a coin's toss, and fully."""
_NEWEST = 64
"""So many trials of a rung are compared."""


class Agreement:
    """What is known of every trial at every rung, and how far each rung can be trusted.

    Args:
        rungs: How many there are.
    """

    def __init__(self, rungs: int) -> None:
        self._values: list[dict[int, float]] = [{} for _ in range(rungs)]
        self._trust = [1.0] * rungs
        self._is_stale = False

    def values(self) -> list[Mapping[int, float]]:
        """For each rung, trial id to value; a value that is not finite is infinite."""
        return [*self._values]

    def note(self, rung: int, trial_id: int, value: float) -> None:
        """Note a trial's value at a rung, whether it is judged there or passes by."""
        self._values[rung][trial_id] = value
        self._is_stale = self._is_stale or rung > 0

    def moved(self, stay: Mapping[int, int], rungs: int) -> "Agreement":
        """What is known of the rungs that stay, among others.

        Args:
            stay: Rung to its new number.
            rungs: How many there are now.
        """
        other = Agreement(rungs)
        for rung, now in stay.items():
            for trial_id, value in self._values[rung].items():
                other.note(now, trial_id, value)
        return other

    def forget(self, trial_id: int) -> None:
        """Drop all values of a trial."""
        for values in self._values:
            values.pop(trial_id, None)
        self._is_stale = True

    def trust(self) -> list[float]:
        """For each rung, from 0 to 1; the last one is what all is about, and has 1.

        A rung is trusted as far as every higher one confirms it. Before there are trials to compare
        it is expected to tell what the rung below it told: where the first two rungs rank like a
        coin, the third has to prove itself, and does not get a third of all trials until it has.
        Below a rung that is not trusted at all none is, as nobody would go on from there.
        """
        if self._is_stale:
            self._is_stale = False
            top = len(self._values) - 1
            shares, expected = [], _PRIOR
            for k in range(top):
                each = [self._share(k, k + 1, expected)]
                expected = min(max(each[0], _NOTHING), _PRIOR)
                each += [self._share(k, m, expected) for m in range(k + 2, top + 1)]
                shares.append(min(each))
            grown = [(share - _NOTHING) / (_FULL - _NOTHING) for share in shares]
            self._trust = [*(min(max(each, 0.0), 1.0) for each in grown), 1.0]
            for k in range(top - 1, 0, -1):
                if self._trust[k] == 0:
                    self._trust[k - 1] = 0.0
        return self._trust

    def _share(self, lower: int, higher: int, expected: float) -> float:
        """The share of pairs that two rungs order alike, drawn to what is expected.

        A pair weighs as much as it lies apart at the lower rung, counted in ranks: of trials that
        were promoted because they were alike nobody expects that they keep their order. All
        weights together grow as the number of trials does, not as that of their pairs.
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
    """Of every pair, infinite where it is too large; two that are both infinite do not differ."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart: NDArray[np.float64] = values[:, None] - values[None, :]
    apart[np.isnan(apart)] = 0.0
    return apart
