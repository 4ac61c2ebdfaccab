"""Complete searcher in one file: sequential trials until one is good enough."""

from collections.abc import Mapping
from random import Random
from typing import Any, Literal

from zerolab.schema.hyperparameters import sample_hyperparameters
from zerolab.searcher.interface import ExitReason, Searcher
from zerolab.searcher.operations import Create, Operation, Shutdown, Stop
from zerolab.searcher.section import SearcherConfig


class ToyConfig(SearcherConfig):
    """Sequential trials until one is good enough."""

    name: Literal["toy"]
    """Sequential trials until one is good enough."""

    goal: float
    """The metric at which the search ends."""

    def outline(self, space: Mapping[str, Any]) -> str:
        del space
        return "trials until one is good enough"

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        return ToySearcher(space, seed, self.goal)


class ToySearcher:
    def __init__(self, space: Mapping[str, Any], seed: int, goal: float) -> None:
        self._space, self._seed, self._goal = space, seed, goal
        self._created = 0
        self._over = False

    def initial_operations(self) -> list[Operation]:
        return self._next()

    def trial_created(self, trial_id: int) -> list[Operation]:
        del trial_id
        return []

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        del length
        self._over = self._over or metric <= self._goal
        return [Stop(trial_id)]

    def trial_exited(self, trial_id: int) -> list[Operation]:
        del trial_id
        return [Shutdown()] if self._over else self._next()

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        del reason
        return self.trial_exited(trial_id)

    def progress(self) -> float:
        return float(self._over)

    def _next(self) -> list[Operation]:
        self._created += 1
        rng = Random(f"{self._seed} {self._created}")
        hparams = sample_hyperparameters(self._space, rng)
        return [Create(self._created, hparams, rng.randrange(2**31))]
