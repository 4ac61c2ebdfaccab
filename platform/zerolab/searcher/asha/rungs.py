"""Base class of a bracket: ranked trials of each rung, and the trials that train.

Smaller metrics are better; ties favour the older trial, and NaN ranks last.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from enum import Enum

from zerolab.searcher.operations import Operation, Stop
from zerolab.searcher.view import BracketView, EntryState, RungEntry, RungView

__all__ = ["Rank", "Rungs", "Verdict", "make_rank"]

Rank = tuple[bool, float, int]
"""Whether the metric is NaN, the metric, and the trial's number: sorts trials best first."""


class Verdict(Enum):
    """Decision that follows from a validation."""

    CONTINUE = "continue"
    PAUSE = "pause"
    STOP = "stop"


def make_rank(metric: float, trial_id: int) -> Rank:
    """Make a sortable rank from a metric.

    Args:
        metric: Smaller is better; may be NaN.
        trial_id: Trial that reported it.
    """
    return (True, 0.0, trial_id) if math.isnan(metric) else (False, metric, trial_id)


class Rungs(ABC):
    """Bracket of rungs.

    Args:
        lengths: Lengths of its rungs, rising.
        divisor: One of ``divisor`` trials of a rung is promoted.
        trials: Number of its trials.
        concurrent: Maximum number of its trials that train at a time.
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
        """Training trials, with the rung at which each is judged next."""
        self.stopping: set[int] = set()
        """Trials that were asked to stop and have not ended yet."""
        self.waiting: set[int] = set()
        """Trials that are paused at a rung."""
        self.closed: set[int] = set()
        self.rungs: list[list[Rank]] = [[] for _ in self.lengths]
        """Trials that were judged at each rung, best first."""
        self._promoted: list[set[int]] = [set() for _ in self.lengths]
        self._failed: set[int] = set()
        self._last: dict[int, tuple[Rank, float]] = {}
        """Rank and length of each trial's last report."""
        self._resumable: set[int] = set()
        """Trials that were stopped while paused at a rung, or at the top: they have a checkpoint
        and can continue after growth."""

    @property
    def top(self) -> int:
        """Index of the last rung."""
        return len(self.lengths) - 1

    @property
    def busy(self) -> int:
        """Number of its trials that hold slots or are queued."""
        return len(self.due) + len(self.stopping)

    @property
    def may_create(self) -> bool:
        """Whether it may create another trial."""
        return self.created < self.trials + self.replaced

    @property
    def is_finished(self) -> bool:
        """Whether all its trials were created and have ended."""
        return not self.may_create and len(self.closed) == self.created

    def add_trial(self, trial_id: int) -> int | None:
        """Add a new trial; return the length at which it pauses first, if it does."""
        self.created += 1
        self.due[trial_id] = 0
        return None

    @abstractmethod
    def judge(self, trial_id: int, rank: Rank, length: float) -> Verdict:
        """Decide about a training trial that has reported.

        Args:
            trial_id: Trial of this bracket that is due at a rung.
            rank: Rank of its metric.
            length: How far it has trained.
        """

    def continue_paused_trial(self) -> Operation | None:
        """Return the operation that continues a paused trial, and mark it as promoted."""
        return None

    def force_promotion(self) -> Operation | None:
        """Promote a trial when nothing trains and no new trial follows."""
        return None

    def stop_paused_trials(self) -> Iterator[Operation]:
        """Stop the paused trials: none of them can be promoted any more."""
        for trial_id in sorted(self.waiting):
            self.waiting.discard(trial_id)
            self.stopping.add(trial_id)
            self._resumable.add(trial_id)
            yield Stop(trial_id)

    def grow(
        self, lengths: Sequence[int], trials: int, concurrent: int, lost: Collection[int]
    ) -> list[int]:
        """Accept more trials, and rungs above the existing ones.

        Args:
            lengths: Lengths of all rungs, beginning with the existing ones.
            trials: New number of trials.
            concurrent: Maximum number of its trials that train at a time.
            lost: Trials that cannot continue.

        Returns:
            Ended trials that wait at a rung again, oldest first.
        """
        assert list(lengths[: len(self.lengths)]) == self.lengths, "existing rungs must not change"
        former = self.top
        self.lengths, self.trials, self.concurrent = list(lengths), trials, concurrent
        for _ in range(former, self.top):
            self.rungs.append([])
            self._promoted.append(set())
        reopened = self._select_resumable(former, self._resumable & self.closed - set(lost))
        self.closed -= reopened
        self._resumable -= reopened
        self._failed -= reopened
        self.waiting |= reopened
        return sorted(reopened)

    @abstractmethod
    def _select_resumable(self, former: int, candidates: set[int]) -> set[int]:
        """Select the ended trials that wait at a rung again after growth.

        Args:
            former: Top rung before the growth.
            candidates: Ended trials that can continue.
        """

    def report(self, trial_id: int, rank: Rank, length: float) -> Verdict:
        """Handle a validation; trials that are not due at a rung are ignored."""
        if trial_id not in self.due:
            return Verdict.CONTINUE
        self._last[trial_id] = (rank, length)
        verdict = self.judge(trial_id, rank, length)
        if verdict is not Verdict.CONTINUE:
            if self.due.pop(trial_id) == self.top and not rank[0]:
                self._resumable.add(trial_id)
            (self.stopping if verdict is Verdict.STOP else self.waiting).add(trial_id)
        return verdict

    def close(self, trial_id: int, *, failed: bool, invalid: bool) -> None:
        """Handle the end of a trial, for whatever reason.

        Args:
            trial_id: Trial of this bracket that has not been closed.
            failed: It ended early: it ranks last at the rung that it did not reach.
            invalid: Its hyperparameters were invalid: it is removed and replaced, as long as no
                more trials were replaced than the bracket has.
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
                self.insert(rung, make_rank(math.nan, trial_id))
        elif rung is not None and last is not None:  # it stopped by itself before the rung
            self.insert(rung, last[0])

    def insert(self, rung: int, rank: Rank) -> int:
        """Insert a trial into a rung's ranking; return its position, from 0."""
        position = bisect_left(self.rungs[rung], rank)
        self.rungs[rung].insert(position, rank)
        return position

    def mark_promoted(self, rung: int, trial_id: int) -> None:
        """Mark a trial as promoted from a rung."""
        self._promoted[rung].add(trial_id)

    def is_promoted(self, rung: int, trial_id: int) -> bool:
        """Whether a trial was promoted from a rung."""
        return trial_id in self._promoted[rung]

    def _forget(self, trial_id: int) -> None:
        self._resumable.discard(trial_id)
        for ranked in self.rungs:
            ranked[:] = [rank for rank in ranked if rank[2] != trial_id]
        if self.replaced < self.trials:
            self.replaced += 1

    def progress(self) -> float:
        """Return the share of trials that were judged or have ended, from 0 to 1."""
        judged = len(self.rungs[0]) / (1.2 * self.trials)
        ended = (len(self.closed) - self.replaced) / self.trials
        return min(max(judged, ended, 0.0), 1.0)

    def view(self, sign: float) -> BracketView:
        """Return the state of its trials.

        Args:
            sign: Factor that was applied to the metrics (-1 when greater is better).
        """
        rungs = []
        for index, length in enumerate(self.lengths):
            training = sorted(trial_id for trial_id, rung in self.due.items() if rung == index)
            entries = tuple(self._entry(index, rank, sign) for rank in self.rungs[index])
            rungs.append(RungView(length, tuple(training), entries))
        return BracketView(self.trials, tuple(rungs))

    def _entry(self, rung: int, rank: Rank, sign: float) -> RungEntry:
        is_nan, value, trial_id = rank
        if self.is_promoted(rung, trial_id):
            state = EntryState.PROMOTED
        elif trial_id in self._failed:
            state = EntryState.FAILED
        elif trial_id in self.waiting:
            state = EntryState.PAUSED
        else:
            state = EntryState.COMPLETED if rung == self.top else EntryState.STOPPED
        return RungEntry(trial_id, None if is_nan else sign * value, state)
