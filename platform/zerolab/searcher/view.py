"""What a searcher knows, for people: who stands where."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

__all__ = ["BracketView", "EntryState", "HasView", "RungEntry", "RungView", "SearchView"]


class EntryState(StrEnum):
    """What became of a trial at a rung."""

    PROMOTED = "promoted"
    """It went on to the next rung."""
    PAUSED = "paused"
    """It waits there, and may still be promoted."""
    STOPPED = "stopped"
    """It ended there: others were better, or it had done enough by itself."""
    COMPLETED = "completed"
    """It has come to the highest rung."""
    FAILED = "failed"
    """It ended early, in an error or by a user, and ranks last."""


@dataclass(frozen=True)
class RungEntry:
    """A trial that was judged at a rung."""

    trial_id: int
    """The searcher's own number of the trial."""
    metric: float | None
    """As it was reported; None when it was not a number, or never reported."""
    state: EntryState


@dataclass(frozen=True)
class RungView:
    """A length at which trials are compared."""

    length: int
    """In the unit of the search."""
    training: tuple[int, ...]
    """Trials on their way to it."""
    entries: tuple[RungEntry, ...]
    """Trials that have been judged there, best first."""


@dataclass(frozen=True)
class BracketView:
    """Rungs with lists of their own."""

    trials: int
    """How many trials it has at most, if none has to be replaced."""
    rungs: tuple[RungView, ...]
    """The lowest first."""


@dataclass(frozen=True)
class SearchView:
    """Where the trials of a search stand."""

    brackets: tuple[BracketView, ...] = ()


@runtime_checkable
class HasView(Protocol):
    """A searcher that can say where its trials stand."""

    def view(self) -> SearchView:
        """Where its trials stand now."""
        ...
