"""A cluster in a loop: so many workers, trials that are started, paused, resumed and stopped.

Times are in full trainings of a trial of middle speed.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.searching.objective import EPOCHS, Curve, Objective
from zerolab.searcher import Continue, Create, Operation, Searcher, Stop

START = 0.1
"""Epochs that a start, or a resumption, costs."""
TIMES = (1, 2, 5, 10, 20)
"""When it is asked how good the best trial so far is."""


@dataclass
class Trial:
    """State of one trial."""

    curve: Curve
    rng: Random
    speed: float
    until: float = math.inf
    epoch: int = 0
    runs: bool = False
    stopped: bool = False
    before: int = 0
    """Epochs that its weights had been trained when it began."""


@dataclass
class Cluster:
    """Runs a searcher on an objective.

    Args:
        objective: What is searched.
        workers: How many trials train at a time.
        seed: Of speeds and noise; the same trial number sees the same in every method.
    """

    objective: Objective
    workers: int
    seed: int
    trials: dict[int, Trial] = field(default_factory=dict)
    seen: list[tuple[float, int, int, float]] = field(default_factory=list)
    """(time, trial, epochs of its weights, value): everything that was reported, in order."""

    def run(self, searcher: Searcher, horizon: float) -> None:
        """Run until the time is over, or the search is."""
        self._queue: deque[int] = deque()
        self._heap: list[tuple[float, int, int]] = []
        self._number = itertools.count()
        self._idle, self._now = self.workers, 0.0
        self._searcher = searcher
        self._take(searcher.initial_operations())
        while self._heap:
            self._now, _, trial_id = heapq.heappop(self._heap)
            if self._now > horizon:
                break
            self._report(trial_id)

    def _report(self, trial_id: int) -> None:
        trial = self.trials[trial_id]
        trial.epoch += 1
        age = min(trial.before + trial.epoch, EPOCHS)
        value = float(trial.curve[age - 1]) + self.objective.noise(trial.rng, age)
        self.seen.append((self._now, trial_id, age, value))
        self._take(self._searcher.validation_completed(trial_id, value, trial.epoch), trial_id)
        if trial.stopped or trial.epoch >= EPOCHS:
            self._leave(trial)
            trial.stopped = True
            self._take(self._searcher.trial_exited(trial_id))
        elif trial.epoch >= trial.until:
            self._leave(trial)
        else:
            self._schedule(trial_id, 1.0)
        self._start()

    def _leave(self, trial: Trial) -> None:
        trial.runs = False
        self._idle += 1

    def _schedule(self, trial_id: int, epochs: float) -> None:
        at = self._now + epochs * self.trials[trial_id].speed / EPOCHS
        heapq.heappush(self._heap, (at, next(self._number), trial_id))

    def _take(self, operations: Sequence[Operation], running: int | None = None) -> None:
        waiting = deque(operations)
        while waiting:
            operation = waiting.popleft()
            if isinstance(operation, Create):
                self._create(operation)
                waiting.extend(self._searcher.trial_created(operation.trial_id))
            elif isinstance(operation, Continue):
                trial = self.trials[operation.trial_id]
                trial.until = operation.until
                if not trial.runs and operation.trial_id not in self._queue:
                    self._queue.append(operation.trial_id)
            elif isinstance(operation, Stop):
                trial = self.trials[operation.trial_id]
                already, trial.stopped = trial.stopped, True
                if not trial.runs and not already:
                    waiting.extend(self._searcher.trial_exited(operation.trial_id))
        if running is None:
            self._start()

    def _create(self, operation: Create) -> None:
        rng = Random(f"{self.seed} {operation.trial_id}")
        speed = rng.uniform(0.7, 1.4)
        curve = self.objective.curve(operation.hparams)
        trial = self.trials[operation.trial_id] = Trial(curve, rng, speed)
        if operation.source is not None:
            source = self.trials[operation.source]
            trial.before = source.before + source.epoch
        self._queue.append(operation.trial_id)

    def _start(self) -> None:
        while self._idle and self._queue:
            trial_id = self._queue.popleft()
            trial = self.trials[trial_id]
            if trial.stopped or trial.epoch >= trial.until:
                continue
            trial.runs = True
            self._idle -= 1
            self._schedule(trial_id, 1 + START)

    def regret(self, times: Sequence[float]) -> list[float]:
        """The normalised regret of the best trial so far, at each time.

        Only the longest trainings count where short ones see another function; then what counts is
        the value that the configuration has at full length. Else it is the value of the trial's
        weights at their best. Before anything was seen it is 1: any random configuration.
        """
        best, median = self.objective.scale
        found: list[float] = []
        incumbent, longest, value = math.inf, 0, median
        events: Any = iter(self.seen)
        event = next(events, None)
        for time in times:
            while event is not None and event[0] <= time:
                _, trial_id, epoch, seen = event
                if self.objective.biased:
                    rung = _rung(epoch)
                    if math.isfinite(seen) and (rung, -seen) > (longest, -incumbent):
                        incumbent, longest = seen, rung
                        value = float(self.trials[trial_id].curve[-1])
                elif seen < incumbent:
                    incumbent, value = seen, float(self.trials[trial_id].curve[epoch - 1])
                event = next(events, None)
            found.append((value - best) / (median - best))
        return found


def _rung(epoch: int) -> int:
    """The longest of the usual rungs that a training has come to."""
    return max(level for level in (0, 1, 3, 9, 27) if level <= epoch)
