"""Searchers that know their trials beforehand: one, so many samples, or every point of a grid."""

from collections.abc import Callable
from random import Random
from typing import Any

from zerolab.searcher.concurrency import FillingSearcher
from zerolab.searcher.interface import ExitReason
from zerolab.searcher.operations import Create, Operation, Shutdown

__all__ = ["ListedSearcher", "trial_rng"]

_COMPLETED = "completed"


def trial_rng(seed: int, trial_id: int) -> Random:
    """The randomness of one trial, which depends on nothing that happened before.

    Args:
        seed: Of the experiment.
        trial_id: Number within the experiment, from 1.
    """
    return Random(f"trial {trial_id} of {seed}")  # noqa: S311 - nothing secret


class ListedSearcher(FillingSearcher):
    """Runs a fixed number of trials, so many at a time.

    Args:
        propose: Gives a trial's hyperparameters by its number, from 1, and its randomness; asked
            once for each, in their order.
        total: How many trials there are.
        concurrent: How many exist at a time; 0 means all.
        seed: Of the experiment.
        length: How far a trial trains, in the unit of the search; 0 when it decides by itself.
        replaces_invalid: Whether a trial with impossible hyperparameters is replaced by a new
            one, which happens at most ``total`` times.
    """

    def __init__(
        self,
        propose: Callable[[int, Random], dict[str, Any]],
        total: int,
        concurrent: int,
        seed: int,
        length: int,
        *,
        replaces_invalid: bool,
    ) -> None:
        self._propose = propose
        self._total = total
        self._concurrent = concurrent or total
        self._seed = seed
        self._length = length
        self._replaces_invalid = replaces_invalid
        self._created = 0
        self._replaced = 0
        self._closed: dict[int, str] = {}  # trial id -> how it ended
        self._reached: dict[int, float] = {}  # trial id -> length at its last report
        self._over = False

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Nothing follows but progress: no trial of these searchers is stopped by its metric."""
        del metric
        if self._is_open(trial_id):
            self._reached[trial_id] = max(length, self._reached.get(trial_id, 0))
        return []

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """Make room for the next trial."""
        return self._close(trial_id, _COMPLETED)

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """Make room for the next trial; one with impossible hyperparameters may be replaced.

        Raises:
            ValueError: If the reason is not an :class:`ExitReason`.
        """
        return self._close(trial_id, ExitReason(reason).value)

    def progress(self) -> float:
        """Mean over all trials that there will be, from 0 to 1."""
        if self._over:
            return 1.0
        done = float(len(self._closed) - self._replaced)
        for trial_id, reached in self._reached.items():
            if self._is_open(trial_id) and self._length:
                done += min(reached / self._length, 1.0)
        return min(max(done, 0.0) / self._total, 1.0)

    def _is_open(self, trial_id: int) -> bool:
        return 1 <= trial_id <= self._created and trial_id not in self._closed

    def _close(self, trial_id: int, how: str) -> list[Operation]:
        if not self._is_open(trial_id):
            return []
        self._closed[trial_id] = how
        self._reached.pop(trial_id, None)
        is_invalid = how == ExitReason.INVALID_HP.value
        if is_invalid and self._replaces_invalid and self._replaced < self._total:
            self._replaced += 1
        return self._fill()

    def _fill(self) -> list[Operation]:
        if self._over:
            return []
        operations: list[Operation] = []
        wanted = self._total + self._replaced
        while self._created < wanted and self._created - len(self._closed) < self._concurrent:
            self._created += 1
            rng = trial_rng(self._seed, self._created)
            hparams = self._propose(self._created, rng)
            operations.append(Create(self._created, hparams, rng.randrange(2**31)))
        if self._created == wanted == len(self._closed):
            self._over = True
            operations.append(Shutdown())
        return operations
