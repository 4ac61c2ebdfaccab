"""The one face of all searchers, and the other of those that decide elsewhere."""

from enum import StrEnum
from typing import Protocol, runtime_checkable

from zerolab.searcher.operations import Operation

__all__ = ["ExitReason", "Searcher", "ServedOutside"]


class ExitReason(StrEnum):
    """Why a trial ended before its length."""

    ERRORED = "errored"
    """It failed more often than it may be restarted."""
    INVALID_HP = "invalid_hp"
    """It declared its hyperparameters impossible."""
    USER_CANCELED = "user_canceled"
    """A user stopped it."""


class Searcher(Protocol):
    """Decides which trials exist and how far they go.

    Every method that takes an event returns the operations that follow from it. The same seed
    and the same events give the same operations, so the state can be rebuilt from an event log. An
    event that was told before, or that speaks of a trial which has ended or never was, changes
    nothing.
    """

    def initial_operations(self) -> list[Operation]:
        """The trials to begin with; called once, before any event."""
        ...

    def trial_created(self, trial_id: int) -> list[Operation]:
        """A trial that was asked for exists now."""
        ...

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """A trial has reported the searcher's metric.

        Args:
            trial_id: Which.
            metric: May be NaN, which ranks last.
            length: How far it has trained, in the unit of the search.
        """
        ...

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """A trial has reached its length, or has stopped as asked."""
        ...

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """A trial ended for another reason."""
        ...

    def progress(self) -> float:
        """From 0 to 1."""
        ...


@runtime_checkable
class ServedOutside(Protocol):
    """A searcher whose operations come from another process."""

    handled: int
    """The last event that was answered; -1 before the first operations, 0 after them."""

    def operated(self, handled: int, progress: float | None) -> None:
        """Note that operations came, which answer all events up to one.

        Args:
            handled: Number of that event.
            progress: How far the search is, from 0 to 1; None to leave it.
        """
        ...
