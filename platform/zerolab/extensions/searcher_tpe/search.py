"""The ``tpe_asha`` searcher, driven by events."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from zerolab.extensions.searcher_tpe.ladder import Ladder
from zerolab.extensions.searcher_tpe.proposals import Proposer
from zerolab.schema.space import Point, Space
from zerolab.searcher.interface import ExitReason
from zerolab.searcher.operations import Continue, Create, Operation, Reopen, Shutdown, Stop
from zerolab.searcher.predefined import ConcurrentSearcher, trial_rng
from zerolab.searcher.view import BracketView, EntryState, RungEntry, RungView, SearchView

__all__ = ["TpeAshaSearcher"]

_COMPLETED = "completed"
_MOST_PROPOSED = 200
"""Maximum number of trials in one event that are proposed by the model, which takes time."""


class TpeAshaSearcher(ConcurrentSearcher):
    """Keeps trials training, up to a limit: promotes the best of a rung, else creates new ones.

    Args:
        space: Hyperparameters as in the experiment file.
        length: Maximum length of a trial, in the unit of the search.
        total: Number of trials.
        concurrent: Maximum number of trials that train at a time; trials paused at a rung do not
            count.
        seed: Seed of the experiment.
        smaller_is_better: Whether a smaller metric is better.
    """

    def __init__(
        self,
        space: Mapping[str, Any],
        length: int,
        total: int,
        concurrent: int,
        seed: int,
        *,
        smaller_is_better: bool,
    ) -> None:
        self._space = Space(space)
        self._proposer = Proposer(self._space)
        self._ladder = Ladder(length)
        self._total = total
        self._concurrent = concurrent
        self._seed = seed
        self._sign = 1.0 if smaller_is_better else -1.0
        self._created = 0
        self._replaced = 0
        self._points: dict[int, Point] = {}
        self._due: dict[int, int] = {}  # training trial -> rung at which it is judged next
        self._first: dict[int, int] = {}  # trial id -> rung: not judged yet
        self._last: dict[int, float] = {}  # trial id -> its last value, while it trains
        self._ended: dict[int, str] = {}  # trial id -> reason
        self._stopping: set[int] = set()  # asked to stop, and not ended yet
        self._resumable: set[int] = set()  # stopped at their rung at the end of the search
        self._closing = False
        self._is_finished = False

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Judge a trial that has reached its rung or has diverged."""
        rung = self._due.get(trial_id)
        if rung is None:
            return []
        value = self._sign * metric
        value = value if math.isfinite(value) else math.inf
        self._last[trial_id] = value
        if length < self._ladder.levels[rung] and math.isfinite(value):
            self._ladder.record_intermediate(length, value, trial_id)
            return []
        self._judge(trial_id, value)
        if rung < self._ladder.top and math.isfinite(value):
            return self._fill()
        self._stopping.add(trial_id)
        if math.isfinite(value):
            self._resumable.add(trial_id)
        return [Stop(trial_id), *self._fill()]

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """Judge a trial that ended by itself before its rung, by its last report."""
        return self._end(trial_id, _COMPLETED, self._last.get(trial_id, math.inf))

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """Rank a failed trial last; replace one with invalid hyperparameters.

        Raises:
            ValueError: If the reason is not an :class:`ExitReason`.
        """
        return self._end(trial_id, ExitReason(reason).value, math.inf)

    def grow(self, length: int, total: int, lost: Collection[int]) -> list[Operation]:
        """Continue with more trials, or longer ones.

        Args:
            length: New maximum length of a trial; the previous one is among its rungs.
            total: New number of trials.
            lost: Trials that have no checkpoint left to resume from.

        Returns:
            Operations that follow: trials that were stopped at their rung wait there again.
        """
        new_rungs = self._ladder.grow(length)
        operations: list[Operation] = []
        for trial_id, rung in self._due.items():
            self._due[trial_id] = new_rungs.get(rung, 0)
            if rung not in new_rungs:  # its rung was dropped: judge it at the lowest one
                operations.append(Continue(trial_id, self._ladder.levels[0]))
        self._first = {trial_id: self._due[trial_id] for trial_id in self._first}
        self._total = total
        self._closing = self._is_finished = False
        below = self._ladder.rungs[: self._ladder.top]
        judged_below_top = {trial_id for rung in below for _, trial_id in rung}
        reopened = (self._resumable & self._ended.keys() & judged_below_top) - set(lost)
        for trial_id in sorted(reopened):
            del self._ended[trial_id]
            self._resumable.discard(trial_id)
            operations.append(Reopen(trial_id))
        return operations + self._fill()

    def progress(self) -> float:
        """Return the share of trials that were judged or have ended, from 0 to 1."""
        if self._is_finished:
            return 1.0
        judged = self._created - self._replaced - len(self._first)
        ended = len(self._ended) - self._replaced
        return min(max(judged / 1.2, ended, 0.0) / self._total, 1.0)

    def view(self) -> SearchView:
        """Return the state of all trials."""
        rungs = []
        for rung, length in enumerate(self._ladder.levels):
            training = sorted(trial_id for trial_id, due in self._due.items() if due == rung)
            entries = [self._entry(rung, *judged) for judged in self._ladder.rungs[rung]]
            rungs.append(RungView(length, tuple(training), tuple(entries)))
        return SearchView((BracketView(self._total, tuple(rungs)),))

    def _entry(self, rung: int, value: float, trial_id: int) -> RungEntry:
        failed = self._ended.get(trial_id, _COMPLETED) != _COMPLETED
        if self._ladder.is_promoted(rung, trial_id):
            state = EntryState.PROMOTED
        elif failed:
            state = EntryState.FAILED
        elif rung == self._ladder.top:
            state = EntryState.COMPLETED
        elif trial_id in self._ended or trial_id in self._stopping:
            state = EntryState.STOPPED
        else:
            state = EntryState.PAUSED
        return RungEntry(trial_id, self._sign * value if math.isfinite(value) else None, state)

    def _judge(self, trial_id: int, value: float) -> None:
        self._ladder.insert(self._due.pop(trial_id), value, trial_id)
        self._first.pop(trial_id, None)
        self._last.pop(trial_id, None)

    def _end(self, trial_id: int, reason: str, value: float) -> list[Operation]:
        if not 1 <= trial_id <= self._created or trial_id in self._ended:
            return []
        self._ended[trial_id] = reason
        self._stopping.discard(trial_id)
        if reason == ExitReason.INVALID_HP.value and trial_id in self._first:
            self._forget(trial_id)
        elif trial_id in self._due:
            self._judge(trial_id, value)
        return self._fill()

    def _forget(self, trial_id: int) -> None:
        del self._due[trial_id]
        self._ladder.remove_trial(self._first.pop(trial_id), trial_id)
        if self._replaced < self._total:
            self._replaced += 1

    def _fill(self) -> list[Operation]:
        operations: list[Operation] = []
        before = self._created
        while not self._closing and len(self._due) + len(self._stopping) < self._concurrent:
            promoted = self._ladder.promote(self._ended)
            if promoted is not None:
                operations.append(self._continue_trial(*promoted))
            elif self._created < self._total + self._replaced:
                operations += self._create(at_random=self._created - before >= _MOST_PROPOSED)
            else:
                break
        if not self._due and not self._stopping and not self._is_finished:
            operations += self._finish()
        return operations

    def _continue_trial(self, trial_id: int, rung: int) -> Operation:
        self._due[trial_id] = rung
        return Continue(trial_id, self._ladder.levels[rung])

    def _create(self, *, at_random: bool) -> list[Operation]:
        self._created += 1
        trial_id = self._created
        rng = trial_rng(self._seed, trial_id)
        seed = rng.randrange(2**31)
        rung = self._ladder.assign_entry_rung()
        if at_random:
            point = self._space.point(rng)
        else:
            point = self._proposer.propose(self._ladder, self._points, list(self._first), rng)
        self._points[trial_id] = point
        self._due[trial_id] = self._first[trial_id] = rung
        create = Create(trial_id, self._space.hparams(point), seed)
        return [create, Continue(trial_id, self._ladder.levels[rung])]

    def _finish(self) -> list[Operation]:
        """Stop the trials that wait at a rung: nothing trains, and nothing may start."""
        chosen = None if self._closing else self._ladder.force_promotion(self._ended)
        if chosen is not None:
            return [self._continue_trial(*chosen)]
        self._closing = True
        waiting = [trial_id for trial_id in self._points if trial_id not in self._ended]
        if waiting:
            self._stopping.update(waiting)
            self._resumable.update(waiting)
            return [Stop(trial_id) for trial_id in waiting]
        self._is_finished = True
        return [Shutdown()]
