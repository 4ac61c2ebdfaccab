"""One bracket: lists of the trials that were judged at each rung, and who trains toward which.

Of two metrics the smaller one is the better; ties go to the older trial, and NaN ranks last.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from enum import Enum

from zerolab.searcher.operations import Operation, Stop
from zerolab.searcher.view import BracketView, EntryState, RungEntry, RungView

__all__ = ["Rank", "Rungs", "Verdict", "rank_of"]

Rank = tuple[bool, float, int]
"""Whether the metric is NaN, the metric, and the trial's number: sorts as trials rank."""


class Verdict(Enum):
    """What follows from a validation."""

    GO_ON = "go on"
    PAUSE = "pause"
    STOP = "stop"


def rank_of(metric: float, trial_id: int) -> Rank:
    """Make a metric sortable.

    Args:
        metric: The smaller the better; may be NaN.
        trial_id: Whose.
    """
    return (True, 0.0, trial_id) if math.isnan(metric) else (False, metric, trial_id)


class Rungs(ABC):
    """A bracket.

    Args:
        lengths: Of its rungs, rising.
        divisor: Of the trials of a rung, one in so many goes on.
        trials: How many it has.
        concurrent: How many of them train at a time.
    """

    def __init__(
        self, lengths: Sequence[int], divisor: float, trials: int, concurrent: int
    ) -> None:
        self.lengths = list(lengths)
        self.divisor = divisor
        self.trials = trials
        self.concurrent = concurrent
        self.created = 0
        self.replaced = 0
        self.due: dict[int, int] = {}
        """Trials that train, with the rung at which they are judged next."""
        self.stopping: set[int] = set()
        """Trials that were told to stop, and have not ended yet."""
        self.waiting: set[int] = set()
        """Trials that are paused at a rung."""
        self.closed: set[int] = set()
        self.rungs: list[list[Rank]] = [[] for _ in self.lengths]
        """Trials that were judged at each rung, best first."""
        self._went_on: list[set[int]] = [set() for _ in self.lengths]
        self._failed: set[int] = set()
        self._last: dict[int, tuple[Rank, float]] = {}
        """Rank and length of each trial's last report."""
        self._resting: set[int] = set()
        """Trials that were stopped as they waited at a rung, or because they had come to the top:
        they could go on."""

    @property
    def top(self) -> int:
        """The last rung."""
        return len(self.lengths) - 1

    @property
    def busy(self) -> int:
        """How many of its trials have slots, or wait for some."""
        return len(self.due) + len(self.stopping)

    @property
    def may_create(self) -> bool:
        """Whether it may have another trial."""
        return self.created < self.trials + self.replaced

    @property
    def is_over(self) -> bool:
        """Whether it has had all its trials, and they have ended."""
        return not self.may_create and len(self.closed) == self.created

    def admit(self, trial_id: int) -> int | None:
        """Take a new trial in; return the length at which it pauses first, if it does."""
        self.created += 1
        self.due[trial_id] = 0
        return None

    @abstractmethod
    def judge(self, trial_id: int, rank: Rank, length: float) -> Verdict:
        """Decide about a trial that trains and has reported.

        Args:
            trial_id: One of this bracket, which is due at a rung.
            rank: Of its metric.
            length: How far it has trained.
        """

    def go_on(self) -> Operation | None:
        """What a paused trial should do next, if one should go on; marks it as done."""
        return None

    def last_chance(self) -> Operation | None:
        """The same when nobody trains and no new trial comes."""
        return None

    def finish(self) -> Iterator[Operation]:
        """Stop the trials that are paused, for none of them will go on."""
        for trial_id in sorted(self.waiting):
            self.waiting.discard(trial_id)
            self.stopping.add(trial_id)
            self._resting.add(trial_id)
            yield Stop(trial_id)

    def grow(
        self, lengths: Sequence[int], trials: int, concurrent: int, lost: Collection[int]
    ) -> list[int]:
        """Take more trials, and rungs above those that there are.

        Args:
            lengths: Of all rungs; begins with those that there are.
            trials: How many it has from now on.
            concurrent: How many of them train at a time.
            lost: Trials that cannot go on.

        Returns:
            Ended trials that wait at a rung again, the oldest first.
        """
        assert list(lengths[: len(self.lengths)]) == self.lengths, "rungs stay where they are"
        former = self.top
        self.lengths, self.trials, self.concurrent = list(lengths), trials, concurrent
        for _ in range(former, self.top):
            self.rungs.append([])
            self._went_on.append(set())
        again = self._wait_again(former, self._resting & self.closed - set(lost))
        self.closed -= again
        self._resting -= again
        self._failed -= again
        self.waiting |= again
        return sorted(again)

    @abstractmethod
    def _wait_again(self, former: int, able: set[int]) -> set[int]:
        """Choose those who wait at a rung again, now that the bracket has grown.

        Args:
            former: The rung that was the top before.
            able: Trials that have ended, and could go on.
        """

    def report(self, trial_id: int, rank: Rank, length: float) -> Verdict:
        """Take a validation; one of a trial that is not due at any rung changes nothing."""
        if trial_id not in self.due:
            return Verdict.GO_ON
        self._last[trial_id] = (rank, length)
        verdict = self.judge(trial_id, rank, length)
        if verdict is not Verdict.GO_ON:
            if self.due.pop(trial_id) == self.top and not rank[0]:
                self._resting.add(trial_id)
            (self.stopping if verdict is Verdict.STOP else self.waiting).add(trial_id)
        return verdict

    def close(self, trial_id: int, *, failed: bool, invalid: bool) -> None:
        """Take the end of a trial, whoever wanted it; it never goes on, and blocks nobody.

        Args:
            trial_id: One of this bracket that has not been closed.
            failed: It ended early: it ranks last at the rung that it did not reach.
            invalid: Its hyperparameters were impossible: it is forgotten, and replaced as long as
                not more trials were than there should be.
        """
        self.closed.add(trial_id)
        rung = self.due.pop(trial_id, None)
        was_stopped = trial_id in self.stopping
        self.stopping.discard(trial_id)
        self.waiting.discard(trial_id)
        last = self._last.get(trial_id)
        if invalid:
            self._forget(trial_id)
            return
        if failed:
            self._failed.add(trial_id)
        if failed and not was_stopped:
            if rung is not None:
                self.insert(rung, rank_of(math.nan, trial_id))
        elif rung is not None and last is not None:  # it has ended by itself
            self.insert(rung, last[0])

    def insert(self, rung: int, rank: Rank) -> int:
        """Put a trial into a rung's list; return its place, from 0."""
        place = bisect_left(self.rungs[rung], rank)
        self.rungs[rung].insert(place, rank)
        return place

    def mark_gone_on(self, rung: int, trial_id: int) -> None:
        """Note that a trial has left a rung for the next one."""
        self._went_on[rung].add(trial_id)

    def has_gone_on(self, rung: int, trial_id: int) -> bool:
        """Whether a trial has left a rung for the next one."""
        return trial_id in self._went_on[rung]

    def _forget(self, trial_id: int) -> None:
        self._resting.discard(trial_id)
        for ranked in self.rungs:
            ranked[:] = [each for each in ranked if each[2] != trial_id]
        if self.replaced < self.trials:
            self.replaced += 1

    def progress(self) -> float:
        """How many have been judged, or have ended; from 0 to 1."""
        judged = len(self.rungs[0]) / (1.2 * self.trials)
        ended = (len(self.closed) - self.replaced) / self.trials
        return min(max(judged, ended, 0.0), 1.0)

    def view(self, sign: float) -> BracketView:
        """Where its trials stand.

        Args:
            sign: What ranks were multiplied by.
        """
        rungs = []
        for index, length in enumerate(self.lengths):
            training = sorted(trial_id for trial_id, rung in self.due.items() if rung == index)
            entries = tuple(self._entry(index, rank, sign) for rank in self.rungs[index])
            rungs.append(RungView(length, tuple(training), entries))
        return BracketView(self.trials, tuple(rungs))

    def _entry(self, rung: int, rank: Rank, sign: float) -> RungEntry:
        is_nan, value, trial_id = rank
        if self.has_gone_on(rung, trial_id):
            state = EntryState.PROMOTED
        elif trial_id in self._failed:
            state = EntryState.FAILED
        elif trial_id in self.waiting:
            state = EntryState.PAUSED
        else:
            state = EntryState.COMPLETED if rung == self.top else EntryState.STOPPED
        return RungEntry(trial_id, None if is_nan else sign * value, state)
