"""``tpe_asha`` as a fold over events."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from zerolab.schema.space import Point, Space
from zerolab.searcher.concurrency import FillingSearcher
from zerolab.searcher.interface import ExitReason
from zerolab.searcher.operations import Continue, Create, Operation, Reopen, Shutdown, Stop
from zerolab.searcher.predefined import trial_rng
from zerolab.searcher.tpe.ladder import Ladder
from zerolab.searcher.tpe.proposals import Proposer
from zerolab.searcher.view import BracketView, EntryState, RungEntry, RungView, SearchView

__all__ = ["TpeAshaSearcher"]

_COMPLETED = "completed"
_MOST_PROPOSED = 200
"""Trials that begin in one event and are drawn from what is known, which takes its time."""


class TpeAshaSearcher(FillingSearcher):
    """Keeps so many trials training: the best of a rung go on, else a new one begins.

    Args:
        space: Hyperparameters as a file has them.
        length: How far a trial may train, in the unit of the search.
        total: How many trials there are.
        concurrent: How many train at a time; trials that are paused at a rung do not count.
        seed: Of the experiment.
        smaller_is_better: Whether a smaller metric is the better one.
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
        self._due: dict[int, int] = {}  # trial id -> rung at which it is judged next: it trains
        self._first: dict[int, int] = {}  # trial id -> rung: on its first stretch
        self._last: dict[int, float] = {}  # trial id -> its last value, while it trains
        self._ended: dict[int, str] = {}  # trial id -> how
        self._stopping: set[int] = set()  # told to stop, and not ended yet
        self._resting: set[int] = set()  # stopped at their rung, for nothing was left to do
        self._closing = False
        self._over = False

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Judge a trial that has come to its rung, or that has diverged on the way."""
        rung = self._due.get(trial_id)
        if rung is None:
            return []
        value = self._sign * metric
        value = value if math.isfinite(value) else math.inf
        self._last[trial_id] = value
        if length < self._ladder.levels[rung] and math.isfinite(value):
            self._ladder.pass_by(length, value, trial_id)
            return []
        self._judge(trial_id, value)
        if rung < self._ladder.top and math.isfinite(value):
            return self._fill()
        self._stopping.add(trial_id)
        if math.isfinite(value):
            self._resting.add(trial_id)
        return [Stop(trial_id), *self._fill()]

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """A trial that ended by itself before its rung is judged by what it reported last."""
        return self._end(trial_id, _COMPLETED, self._last.get(trial_id, math.inf))

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """A trial that failed ranks last; one with impossible hyperparameters is replaced.

        Raises:
            ValueError: If the reason is not an :class:`ExitReason`.
        """
        return self._end(trial_id, ExitReason(reason).value, math.inf)

    def grow(self, length: int, total: int, lost: Collection[int]) -> list[Operation]:
        """Go on with more trials, or longer ones.

        Args:
            length: How far a trial may train; the length so far is among the rungs of it.
            total: How many trials there are.
            lost: Trials that have no checkpoint left to go on from.

        Returns:
            What is wanted now: trials that were stopped at their rung wait there again.
        """
        stay = self._ladder.grow(length)
        operations: list[Operation] = []
        for trial_id, rung in self._due.items():
            self._due[trial_id] = stay.get(rung, 0)
            if rung not in stay:  # it shall train to the lowest one that is left
                operations.append(Continue(trial_id, self._ladder.levels[0]))
        self._first = {trial_id: self._due[trial_id] for trial_id in self._first}
        self._total = total
        self._closing = self._over = False
        below = self._ladder.rungs[: self._ladder.top]
        standing = {trial_id for rung in below for _, trial_id in rung}
        again = (self._resting & self._ended.keys() & standing) - set(lost)
        for trial_id in sorted(again):
            del self._ended[trial_id]
            self._resting.discard(trial_id)
            operations.append(Reopen(trial_id))
        return operations + self._fill()

    def progress(self) -> float:
        """How many of all trials have been judged, or have ended; from 0 to 1."""
        if self._over:
            return 1.0
        judged = self._created - self._replaced - len(self._first)
        ended = len(self._ended) - self._replaced
        return min(max(judged / 1.2, ended, 0.0) / self._total, 1.0)

    def view(self) -> SearchView:
        """Where the trials stand."""
        rungs = []
        for rung, length in enumerate(self._ladder.levels):
            training = sorted(trial_id for trial_id, due in self._due.items() if due == rung)
            entries = [self._entry(rung, *judged) for judged in self._ladder.rungs[rung]]
            rungs.append(RungView(length, tuple(training), tuple(entries)))
        return SearchView((BracketView(self._total, tuple(rungs)),))

    def _entry(self, rung: int, value: float, trial_id: int) -> RungEntry:
        failed = self._ended.get(trial_id, _COMPLETED) != _COMPLETED
        if self._ladder.has_gone_on(rung, trial_id):
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

    def _end(self, trial_id: int, how: str, value: float) -> list[Operation]:
        if not 1 <= trial_id <= self._created or trial_id in self._ended:
            return []
        self._ended[trial_id] = how
        self._stopping.discard(trial_id)
        if how == ExitReason.INVALID_HP.value and trial_id in self._first:
            self._forget(trial_id)
        elif trial_id in self._due:
            self._judge(trial_id, value)
        return self._fill()

    def _forget(self, trial_id: int) -> None:
        del self._due[trial_id]
        self._ladder.forget(self._first.pop(trial_id), trial_id)
        if self._replaced < self._total:
            self._replaced += 1

    def _fill(self) -> list[Operation]:
        operations: list[Operation] = []
        before = self._created
        while not self._closing and len(self._due) + len(self._stopping) < self._concurrent:
            promoted = self._ladder.promote(self._ended)
            if promoted is not None:
                operations.append(self._go_on(*promoted))
            elif self._created < self._total + self._replaced:
                operations += self._create(anywhere=self._created - before >= _MOST_PROPOSED)
            else:
                break
        if not self._due and not self._stopping and not self._over:
            operations += self._finish()
        return operations

    def _go_on(self, trial_id: int, rung: int) -> Operation:
        self._due[trial_id] = rung
        return Continue(trial_id, self._ladder.levels[rung])

    def _create(self, *, anywhere: bool) -> list[Operation]:
        self._created += 1
        trial_id = self._created
        rng = trial_rng(self._seed, trial_id)
        seed = rng.randrange(2**31)
        rung = self._ladder.enter()
        if anywhere:
            point = self._space.point(rng)
        else:
            point = self._proposer.propose(self._ladder, self._points, list(self._first), rng)
        self._points[trial_id] = point
        self._due[trial_id] = self._first[trial_id] = rung
        create = Create(trial_id, self._space.hparams(point), seed)
        return [create, Continue(trial_id, self._ladder.levels[rung])]

    def _finish(self) -> list[Operation]:
        """Nothing trains, and nothing may begin or go on: end what waits at a rung."""
        chosen = None if self._closing else self._ladder.last_chance(self._ended)
        if chosen is not None:
            return [self._go_on(*chosen)]
        self._closing = True
        waiting = [trial_id for trial_id in self._points if trial_id not in self._ended]
        if waiting:
            self._stopping.update(waiting)
            self._resting.update(waiting)
            return [Stop(trial_id) for trial_id in waiting]
        self._over = True
        return [Shutdown()]
