"""Resources of searches: searchers and their rungs."""

from typing import Literal

from zerolab.searcher.view import EntryState
from zeroserver.api.rows import Num, Resource, Share

__all__ = [
    "Bracket",
    "Rung",
    "RungEntry",
    "SearcherAnswer",
    "SearcherState",
]


class RungEntry(Resource, frozen=True):
    """A trial that was judged at a rung."""

    trial_id: int
    """Which trial."""
    metric: Num | None
    """As it was reported; null when it was not a number, or never came."""
    state: EntryState
    """`promoted` went on to the next rung; `paused` waits, and may still go on; `stopped` ended
    there; `completed` is at the highest rung; `failed` ended early, and ranks last."""


class Rung(Resource, frozen=True):
    """A length at which trials are compared."""

    length: int
    """Length in the unit of the search."""
    training: list[int]
    """Trials on their way to it."""
    entries: list[RungEntry]
    """Trials that were judged there, best first."""


class Bracket(Resource, frozen=True):
    """Rungs with separate lists of trials."""

    trials: int
    """How many trials it has at most, if none has to be replaced."""
    rungs: list[Rung]
    """The lowest first."""


class SearcherState(Resource, frozen=True):
    """Rungs and trials of a search."""

    name: str
    """Which searcher."""
    unit: Literal["batches", "epochs"] | None
    """Unit of all lengths; null if trials decide their lengths."""
    metric: str | None
    """By which trials are compared; null for a single trial that names none."""
    smaller_is_better: bool
    """Which way they are compared."""
    done: bool
    """Whether it wants no more trials."""
    progress: Share
    """0 to 1."""
    brackets: list[Bracket]
    """Empty for a searcher that compares no trials while they train."""
    problem: str | None
    """Why nothing can be said of where the trials stand; null when all is well."""


class SearcherAnswer(Resource, frozen=True):
    """A search."""

    searcher: SearcherState
