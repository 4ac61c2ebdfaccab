"""Searcher protocol, and the protocol of external searchers."""

from enum import StrEnum
from typing import Protocol, runtime_checkable

from zerolab.searcher.operations import Operation

__all__ = ["ExitReason", "ExternalSearcher", "Searcher"]


class ExitReason(StrEnum):
    """Reason why a trial ended before its length."""

    ERRORED = "errored"
    """It failed more often than ``max_restarts`` allows."""
    INVALID_HP = "invalid_hp"
    """It declared its hyperparameters invalid."""
    USER_CANCELED = "user_canceled"
    """A user stopped it."""


class Searcher(Protocol):
    """Protocol of a searcher, which decides about trials and their lengths.

    Every method that takes an event returns the operations that follow from it. The same seed and
    the same events give the same operations, so the state can be rebuilt from an event log.
    Duplicate events, and events of ended or unknown trials, change nothing.

    Example:
        >>> from zerolab.searcher import make_searcher
        >>> block = {"name": "single", "metric": "loss", "max_length": 100}
        >>> searcher = make_searcher(block, {"lr": 0.1}, seed=1)
        >>> searcher.initial_operations()
        [Create(trial_id=1, hparams={'lr': 0.1}, trial_seed=..., source=None)]
        >>> searcher.trial_created(1)
        []
        >>> searcher.validation_completed(1, metric=0.5, length=100)
        []
        >>> searcher.trial_exited(1)
        [Shutdown()]
        >>> searcher.progress()
        1.0
    """

    def initial_operations(self) -> list[Operation]:
        """Return the first operations; called once, before any event.

        Returns:
            Operations, usually the first ``Create``.
        """
        ...

    def trial_created(self, trial_id: int) -> list[Operation]:
        """Handle the creation of a requested trial.

        Args:
            trial_id: Number of the trial in its ``Create``.

        Returns:
            Operations that follow.
        """
        ...

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Handle a validation that reported the searcher's metric.

        Args:
            trial_id: Trial that reported.
            metric: May be NaN, which ranks last.
            length: How far it has trained, in the unit of the search.

        Returns:
            Operations that follow.
        """
        ...

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """Handle a trial that reached its length, or stopped as requested.

        Args:
            trial_id: Trial that ended.

        Returns:
            Operations that follow.
        """
        ...

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """Handle a trial that ended for another reason.

        Args:
            trial_id: Trial that ended.
            reason: ``errored``, ``invalid_hp`` or ``user_canceled``.

        Returns:
            Operations that follow, such as a trial that replaces it.
        """
        ...

    def progress(self) -> float:
        """Return the progress of the search, from 0 to 1.

        Returns:
            1.0 when the search has ended.
        """
        ...


@runtime_checkable
class ExternalSearcher(Protocol):
    """Searcher whose operations come from another process.

    Example:
        >>> from zerolab.searcher import ExternalSearcher, make_searcher
        >>> block = {"name": "custom", "metric": "loss", "max_length": 100}
        >>> isinstance(make_searcher(block, {}, seed=1), ExternalSearcher)
        True
    """

    handled: int
    """Number of the last answered event; -1 before the first operations, 0 after them."""

    def record_operations(self, handled: int, progress: float | None) -> None:
        """Record that operations answered all events up to ``handled``.

        Args:
            handled: Number of the last answered event.
            progress: Progress of the search, from 0 to 1; None leaves it unchanged.
        """
        ...
