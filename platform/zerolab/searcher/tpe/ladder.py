"""The ladder: lengths at which trials are judged, where new ones enter, and who goes on.

Smaller values are better. Whatever is not a finite number has the value infinity, which ranks
last; of equal values the older trial's is the better one.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Container, Mapping

from zerolab.searcher.tpe.rung_correlation import Agreement

__all__ = ["Ladder", "forecast", "make_levels"]

_DIVISOR = 3
_RUNGS = 4
_ENTRIES = (24.0, 8.0, 3.0)
"""Of 35 new trials, so many are first judged at rung 0, 1 and 2."""
_PROBES = (9, 10, 13)
"""New trials, counted from 1, that train to the whole length at once; and then every power of two
from this number on:"""
_DOUBLING = 32
_UNTAUGHT, _TAUGHT = 5, 150
_LEARNERS_GO_ON = 0.75
"""Of the first so many that are judged at a rung a third goes on; of those up to the second number
this part, as they are better than those before them; then there is little left to learn, and it is
a third again. So it was, in the median, in simulated searches of 10 to 1,000 trials."""


def make_levels(length: int) -> list[int]:
    """The lengths of the rungs: a 27th, a 9th, a third of the whole length, and the whole.

    Args:
        length: How far a trial may train; at least 1.

    Returns:
        Rising lengths of at least 1, without doubles.
    """
    levels = {max(length // _DIVISOR**power, 1) for power in range(_RUNGS)}
    return sorted(levels)


def forecast(length: int, trials: int) -> dict[int, int]:
    """How many of so many trials usually end at which length.

    Args:
        length: How far a trial may train.
        trials: How many there are.
    """
    ladder = Ladder(length)
    judged = [0] * len(ladder.levels)
    for _ in range(trials):
        judged[ladder.enter()] += 1
    ends = {}
    for rung, level in enumerate(ladder.levels):
        promoted = _go_on_usually(ladder, rung, judged[rung]) if rung < ladder.top else 0
        if rung < ladder.top:
            judged[rung + 1] += promoted
        ends[level] = judged[rung] - promoted
    last = max(level for level, count in ends.items() if count)
    if last < length:  # of too few, the best of the highest rung goes all the way all the same
        ends[last] -= 1
        ends[length] = 1
    return {level: count for level, count in ends.items() if count}


def _go_on_usually(ladder: "Ladder", rung: int, judged: int) -> int:
    learners = max(min(judged, _TAUGHT) - _UNTAUGHT, 0)
    return ladder.places(rung, judged - learners) + round(_LEARNERS_GO_ON * learners)


class Ladder:
    """Rungs with the value of every trial that was judged there.

    Args:
        length: How far a trial may train, in the unit of the search.
    """

    def __init__(self, length: int) -> None:
        self.levels = make_levels(length)
        self.rungs: list[list[tuple[float, int]]] = [[] for _ in self.levels]
        """For each rung, (value, trial id) of all that were judged there, best first."""
        self._agreement = Agreement(len(self.levels))
        self._entered = 0
        self._owed = [0.0] * len(self.levels)  # entries that a rung should have had by now
        self._promoted: list[set[int]] = [set() for _ in self.levels]

    @property
    def top(self) -> int:
        """The last rung."""
        return len(self.levels) - 1

    def enter(self) -> int:
        """The rung at which the next new trial is first judged."""
        self._entered += 1
        if _is_probe(self._entered):
            return self.top
        shares = self._shares()
        total = sum(shares)
        self._owed = [owed + share / total for owed, share in zip(self._owed, shares, strict=True)]
        open_rungs = (rung for rung, share in enumerate(shares) if share > 0)
        rung = max(open_rungs, key=lambda rung: (self._owed[rung], -rung))
        self._owed[rung] -= 1
        return rung

    def _shares(self) -> list[float]:
        """What part of the new trials each rung gets.

        A rung that is not trusted hands its part on to the next one, as many trials as train for
        the same time there; the whole length is always trusted.
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
        """Put rungs on top; as many as there may be stay, and the lowest fall away.

        Args:
            length: How far a trial may train from now on; the length so far is among its rungs.

        Returns:
            Former rung to rung, for those that stay.
        """
        former, self.levels = self.levels, make_levels(length)
        assert former[-1] in self.levels, "trials must be comparable with those that there are"
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
        self._owed = [0.0] * len(self.levels)
        self._agreement = self._agreement.moved(stay, len(self.levels))
        return stay

    def forget(self, rung: int, trial_id: int) -> None:
        """Take back an entry at a rung: its trial was no possible one."""
        self._entered -= 1
        self._owed[rung] += 1
        self._agreement.forget(trial_id)

    def pass_by(self, length: float, value: float, trial_id: int) -> None:
        """Note what a trial has reported on its way to the rung at which it is judged."""
        if length in self.levels:
            self._agreement.note(self.levels.index(int(length)), trial_id, value)

    def insert(self, rung: int, value: float, trial_id: int) -> None:
        """Judge a trial at a rung."""
        insort(self.rungs[rung], (value, trial_id))
        self._agreement.note(rung, trial_id, value)

    def promote(self, ended: Container[int]) -> tuple[int, int] | None:
        """The trial that should go on before any new one begins, and the rung it goes to.

        Nobody goes on from a rung that is not trusted at all.

        Args:
            ended: Trials that cannot go on.
        """
        for rung in reversed(self.trusted()[:-1]):
            found = self._go_on(rung, self.places(rung, len(self.rungs[rung])), ended)
            if found is not None:
                return found
        return None

    def places(self, rung: int, judged: int) -> int:
        """How many of so many that were judged at a rung may go on.

        A third, rounded down; at the rung below the top rounded up: the first one that comes there
        trains to the end at once.
        """
        more = _DIVISOR - 1 if rung == self.top - 1 else 0
        return (judged + more) // _DIVISOR

    def last_chance(self, ended: Container[int]) -> tuple[int, int] | None:
        """The same when no new trial will come: somebody shall reach the whole length."""
        for rung in range(self.top - 1, -1, -1):
            if any(math.isfinite(value) for value, _ in self.rungs[rung + 1]):
                return None
            found = self._go_on(rung, len(self.rungs[rung]), ended)
            if found is not None:
                return found
        return None

    def _go_on(self, rung: int, best: int, ended: Container[int]) -> tuple[int, int] | None:
        gone = self._promoted[rung]
        for value, trial_id in self.rungs[rung][:best]:
            if trial_id not in gone and trial_id not in ended and math.isfinite(value):
                gone.add(trial_id)
                return trial_id, rung + 1
        return None

    def has_gone_on(self, rung: int, trial_id: int) -> bool:
        """Whether a trial has left a rung for the next one."""
        return trial_id in self._promoted[rung]

    def known(self) -> list[Mapping[int, float]]:
        """For each rung, trial id to value, of all that were judged there or passed by."""
        return self._agreement.values()

    def trusted(self) -> list[int]:
        """Rungs that tell something of what longer trainings come to, and the last one."""
        return [rung for rung, trust in enumerate(self._agreement.trust()) if trust > 0]

    def left_behind(self, known: Collection[int]) -> list[int]:
        """Trials that were judged at a trusted rung and are not among those known.

        Whoever has come far is good, even the last of them: without those that have not, the model
        would take the neighbourhood of the best for bad, and flee it.
        """
        ids = {trial_id for rung in self.trusted()[:-1] for _, trial_id in self.rungs[rung]}
        return sorted(ids - set(known))

    def best_known(self, enough: int) -> tuple[list[int], int] | None:
        """Trials of the highest rung that says enough, best first; and how many did not fail.

        Args:
            enough: Finite values that a rung must have; one that is not trusted says nothing.
        """
        for rung in reversed(self.trusted()):
            judged = self.rungs[rung]
            finite = bisect_left(judged, (math.inf,))
            if finite >= enough:
                return [trial_id for _, trial_id in judged], finite
        return None


def _is_probe(number: int) -> bool:
    """Whether a new trial trains to the whole length, so that rungs can be compared with it."""
    return number in _PROBES or (number >= _DOUBLING and number.bit_count() == 1)
