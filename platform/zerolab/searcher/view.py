"""Read-only view of a search: rungs, brackets and the trials in them."""

from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

__all__ = ["BracketView", "EntryState", "HasView", "RungEntry", "RungView", "SearchView"]


class EntryState(StrEnum):
    """State of a trial at a rung."""

    PROMOTED = "promoted"
    """It was promoted to the next rung."""
    PAUSED = "paused"
    """It is paused there, and may still be promoted."""
    STOPPED = "stopped"
    """It ended there: others were better, or it stopped by itself."""
    COMPLETED = "completed"
    """It reached the highest rung."""
    FAILED = "failed"
    """It ended early, by an error or by a user, and ranks last."""


class RungEntry(msgspec.Struct, frozen=True):
    """Trial that was judged at a rung."""

    trial_id: int
    """Number of the trial within the search."""
    metric: float | None
    """Reported metric; None when it was NaN or never reported."""
    state: EntryState


class RungView(msgspec.Struct, frozen=True):
    """Rung: a length at which trials are compared."""

    length: int
    """In the unit of the search."""
    training: tuple[int, ...]
    """Trials that train toward it."""
    entries: tuple[RungEntry, ...]
    """Trials that have been judged there, best first."""


class BracketView(msgspec.Struct, frozen=True):
    """Bracket: rungs whose trials are compared with each other only."""

    trials: int
    """Maximum number of its trials, without replacements."""
    rungs: tuple[RungView, ...]
    """Its rungs, lowest first."""


class SearchView(msgspec.Struct, frozen=True):
    """State of all trials of a search."""

    brackets: tuple[BracketView, ...] = ()


@runtime_checkable
class HasView(Protocol):
    """Searcher that can show the state of its trials."""

    def view(self) -> SearchView:
        """Return the current state of its trials."""
        ...
