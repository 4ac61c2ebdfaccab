"""Ladder of rungs: lengths at which trials are judged, entry rungs, and promotion.

Smaller values are better. A value that is not finite counts as infinity, which ranks last; ties
favour the older trial.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Container, Mapping

from zerolab.extensions.searcher_tpe.rung_correlation import RungCorrelation

__all__ = ["Ladder", "forecast", "make_levels"]

_DIVISOR = 3
_RUNGS = 4
_ENTRIES = (24.0, 8.0, 3.0)
"""Of 35 new trials, this number is first judged at rung 0, 1 and 2."""
_PROBES = (9, 10, 13)
"""New trials, counted from 1, that train to the full length directly; and then every power of two
from this number on:"""
_DOUBLING = 32
_UNTAUGHT, _TAUGHT = 5, 150
_LEARNERS_GO_ON = 0.75
"""Promoted fraction: a third of the first ``_UNTAUGHT`` trials of a rung; this fraction of those up
to ``_TAUGHT``, which are better than their predecessors; then a third again, as little is left to
learn. Medians of simulated searches of 10 to 1,000 trials."""


def make_levels(length: int) -> list[int]:
    """Return the lengths of the rungs: 1/27, 1/9, 1/3 and all of the full length.

    Args:
        length: Maximum length of a trial; at least 1.

    Returns:
        Rising lengths of at least 1, without duplicates.
    """
    levels = {max(length // _DIVISOR**power, 1) for power in range(_RUNGS)}
    return sorted(levels)


def forecast(length: int, trials: int) -> dict[int, int]:
    """Estimate how many trials end at which length.

    Args:
        length: Maximum length of a trial.
        trials: Number of trials.
    """
    ladder = Ladder(length)
    judged = [0] * len(ladder.levels)
    for _ in range(trials):
        judged[ladder.assign_entry_rung()] += 1
    ends = {}
    for rung, level in enumerate(ladder.levels):
        promoted = _expected_promotions(ladder, rung, judged[rung]) if rung < ladder.top else 0
        if rung < ladder.top:
            judged[rung + 1] += promoted
        ends[level] = judged[rung] - promoted
    last = max(level for level, count in ends.items() if count)
    if last < length:  # with few trials, the best of the highest rung is promoted anyway
        ends[last] -= 1
        ends[length] = 1
    return {level: count for level, count in ends.items() if count}


def _expected_promotions(ladder: "Ladder", rung: int, judged: int) -> int:
    learners = max(min(judged, _TAUGHT) - _UNTAUGHT, 0)
    return ladder.promotion_quota(rung, judged - learners) + round(_LEARNERS_GO_ON * learners)


class Ladder:
    """Rungs with the value of every trial that was judged there.

    Args:
        length: Maximum length of a trial, in the unit of the search.
    """

    def __init__(self, length: int) -> None:
        self.levels = make_levels(length)
        self.rungs: list[list[tuple[float, int]]] = [[] for _ in self.levels]
        """For each rung, (value, trial id) of all judged trials, best first."""
        self._agreement = RungCorrelation(len(self.levels))
        self._entered = 0
        self._entry_deficit = [0.0] * len(self.levels)  # expected minus actual entries of a rung
        self._promoted: list[set[int]] = [set() for _ in self.levels]

    @property
    def top(self) -> int:
        """Index of the last rung."""
        return len(self.levels) - 1

    def assign_entry_rung(self) -> int:
        """Choose the rung at which the next new trial is first judged."""
        self._entered += 1
        if _is_probe(self._entered):
            return self.top
        shares = self._shares()
        total = sum(shares)
        deficits = zip(self._entry_deficit, shares, strict=True)
        self._entry_deficit = [deficit + share / total for deficit, share in deficits]
        # Largest deficit first: the entries follow the shares without randomness.
        open_rungs = (rung for rung, share in enumerate(shares) if share > 0)
        rung = max(open_rungs, key=lambda rung: (self._entry_deficit[rung], -rung))
        self._entry_deficit[rung] -= 1
        return rung

    def _shares(self) -> list[float]:
        """Return each rung's relative share of the new trials.

        An untrusted rung passes its share to the next one, scaled to the same training time. The
        full length is always trusted.
        """
        trust = self._agreement.trust()
        entries = (*_ENTRIES[: self.top], 0.0)
        shares, carried = [], 0.0
        for rung, entry in enumerate(entries):
            share = entry + carried
            shares.append(share * trust[rung])
            if rung < self.top:
                carried = share * (1 - trust[rung]) * self.levels[rung] / self.levels[rung + 1]
        return shares if any(shares) else [1.0]

    def grow(self, length: int) -> dict[int, int]:
        """Add rungs on top; the number of rungs is limited, so the lowest are dropped.

        Args:
            length: New maximum length of a trial; the previous one is among its rungs.

        Returns:
            Former rung to new rung, for remaining rungs.
        """
        former, self.levels = self.levels, make_levels(length)
        assert former[-1] in self.levels, "new trials must be comparable with earlier ones"
        stay = {
            rung: self.levels.index(level)
            for rung, level in enumerate(former)
            if level in self.levels
        }
        rungs, promoted = self.rungs, self._promoted
        self.rungs = [[] for _ in self.levels]
        self._promoted = [set() for _ in self.levels]
        for rung, now in stay.items():
            self.rungs[now], self._promoted[now] = rungs[rung], promoted[rung]
        self._entry_deficit = [0.0] * len(self.levels)
        self._agreement = self._agreement.remapped(stay, len(self.levels))
        return stay

    def remove_trial(self, rung: int, trial_id: int) -> None:
        """Undo an entry at a rung: the trial's hyperparameters were invalid."""
        self._entered -= 1
        self._entry_deficit[rung] += 1
        self._agreement.remove_trial(trial_id)

    def record_intermediate(self, length: float, value: float, trial_id: int) -> None:
        """Record a report of a trial below the rung at which it is judged."""
        if length in self.levels:
            self._agreement.record(self.levels.index(int(length)), trial_id, value)

    def insert(self, rung: int, value: float, trial_id: int) -> None:
        """Judge a trial at a rung."""
        insort(self.rungs[rung], (value, trial_id))
        self._agreement.record(rung, trial_id, value)

    def promote(self, ended: Container[int]) -> tuple[int, int] | None:
        """Return the trial to promote before any new one starts, and its next rung.

        No trial is promoted from an untrusted rung.

        Args:
            ended: Trials that cannot continue.
        """
        for rung in reversed(self.trusted_rungs()[:-1]):
            quota = self.promotion_quota(rung, len(self.rungs[rung]))
            promotion = self._promote_best(rung, quota, ended)
            if promotion is not None:
                return promotion
        return None

    def promotion_quota(self, rung: int, judged: int) -> int:
        """Return how many of the trials judged at a rung may be promoted.

        A third, rounded down; rounded up at the rung below the top, so that its first trial trains
        to the end directly.
        """
        more = _DIVISOR - 1 if rung == self.top - 1 else 0
        return (judged + more) // _DIVISOR

    def force_promotion(self, ended: Container[int]) -> tuple[int, int] | None:
        """Promote a trial when no new one follows, so that one reaches the full length."""
        for rung in range(self.top - 1, -1, -1):
            if any(math.isfinite(value) for value, _ in self.rungs[rung + 1]):
                return None
            promotion = self._promote_best(rung, len(self.rungs[rung]), ended)
            if promotion is not None:
                return promotion
        return None

    def _promote_best(self, rung: int, count: int, ended: Container[int]) -> tuple[int, int] | None:
        promoted = self._promoted[rung]
        for value, trial_id in self.rungs[rung][:count]:
            if trial_id not in promoted and trial_id not in ended and math.isfinite(value):
                promoted.add(trial_id)
                return trial_id, rung + 1
        return None

    def is_promoted(self, rung: int, trial_id: int) -> bool:
        """Whether a trial was promoted from a rung."""
        return trial_id in self._promoted[rung]

    def values_by_rung(self) -> list[Mapping[int, float]]:
        """Return for each rung the values by trial id, including intermediate reports."""
        return self._agreement.values()

    def trusted_rungs(self) -> list[int]:
        """Return the rungs that predict longer trainings, and the last one."""
        return [rung for rung, trust in enumerate(self._agreement.trust()) if trust > 0]

    def judged_below(self, listed: Collection[int]) -> list[int]:
        """Return the trials judged at a trusted rung that are not ``listed``.

        Even the worst trial of a high rung is good. Without the trials that never got there, the
        model would rate the neighbourhood of the best trials as bad, and avoid it.
        """
        ids = {trial_id for rung in self.trusted_rungs()[:-1] for _, trial_id in self.rungs[rung]}
        return sorted(ids - set(listed))

    def best_trials(self, enough: int) -> tuple[list[int], int] | None:
        """Return the best trials of the highest informative rung, and its finite count.

        Args:
            enough: Finite values that a rung must have; untrusted rungs are skipped.
        """
        for rung in reversed(self.trusted_rungs()):
            judged = self.rungs[rung]
            finite = bisect_left(judged, (math.inf,))
            if finite >= enough:
                return [trial_id for _, trial_id in judged], finite
        return None


def _is_probe(number: int) -> bool:
    """Whether a new trial trains to the full length, to compare the rungs with it."""
    return number in _PROBES or (number >= _DOUBLING and number.bit_count() == 1)
