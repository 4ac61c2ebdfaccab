"""Base classes of searchers: limited concurrency, and trials that are known beforehand."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Any

from zerolab.searcher.interface import ExitReason
from zerolab.searcher.operations import Create, Operation, Shutdown

__all__ = ["ConcurrentSearcher", "FixedTrialsSearcher", "trial_rng"]

_COMPLETED = "completed"


def trial_rng(seed: int, trial_id: int) -> Random:
    """Return the random generator of one trial, independent of all earlier events.

    Args:
        seed: Seed of the experiment.
        trial_id: Number within the experiment, from 1.
    """
    return Random(f"trial {trial_id} of {seed}")  # noqa: S311 - nothing secret


class ConcurrentSearcher(ABC):
    """Searcher that keeps a number of trials training; starts one when another ends or pauses."""

    def initial_operations(self) -> list[Operation]:
        """Return the operations that create the first trials."""
        return self._fill()

    def trial_created(self, trial_id: int) -> list[Operation]:
        """Return no operations: the trial was counted when it was requested."""
        del trial_id
        return []

    @abstractmethod
    def _fill(self) -> list[Operation]:
        """Return operations until the maximum number of trials trains."""


class FixedTrialsSearcher(ConcurrentSearcher):
    """Runs a fixed number of trials with limited concurrency.

    Args:
        propose: Returns a trial's hyperparameters from its number (from 1) and its random
            generator; called once for each trial, in order.
        total: Number of trials.
        concurrent: Maximum number of trials that exist at a time; 0 means all.
        seed: Seed of the experiment.
        length: Length of a trial, in the unit of the search; 0 when it decides by itself.
        replaces_invalid: Whether a trial with invalid hyperparameters is replaced by a new one, at
            most ``total`` times.
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
        self._lengths: dict[int, float] = {}  # trial id -> length at its last report
        self._is_finished = False

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Record the progress: metrics never stop a trial here."""
        del metric
        if self._is_open(trial_id):
            self._lengths[trial_id] = max(length, self._lengths.get(trial_id, 0))
        return []

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """Start the next trial."""
        return self._close(trial_id, _COMPLETED)

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """Start the next trial; a trial with invalid hyperparameters may be replaced.

        Raises:
            ValueError: If the reason is not an :class:`ExitReason`.
        """
        return self._close(trial_id, ExitReason(reason).value)

    def progress(self) -> float:
        """Return the mean progress over all planned trials, from 0 to 1."""
        if self._is_finished:
            return 1.0
        done = float(len(self._closed) - self._replaced)
        for trial_id, length in self._lengths.items():
            if self._is_open(trial_id) and self._length:
                done += min(length / self._length, 1.0)
        return min(max(done, 0.0) / self._total, 1.0)

    def _is_open(self, trial_id: int) -> bool:
        return 1 <= trial_id <= self._created and trial_id not in self._closed

    def _close(self, trial_id: int, reason: str) -> list[Operation]:
        if not self._is_open(trial_id):
            return []
        self._closed[trial_id] = reason
        self._lengths.pop(trial_id, None)
        is_invalid = reason == ExitReason.INVALID_HP.value
        if is_invalid and self._replaces_invalid and self._replaced < self._total:
            self._replaced += 1
        return self._fill()

    def _create(self, trial_id: int) -> Operation:
        rng = trial_rng(self._seed, trial_id)
        hparams = self._propose(trial_id, rng)
        return Create(trial_id, hparams, rng.randrange(2**31))

    def _fill(self) -> list[Operation]:
        if self._is_finished:
            return []
        operations: list[Operation] = []
        target = self._total + self._replaced
        while self._created < target and self._created - len(self._closed) < self._concurrent:
            self._created += 1
            operations.append(self._create(self._created))
        if self._created == target == len(self._closed):
            self._is_finished = True
            operations.append(Shutdown())
        return operations
