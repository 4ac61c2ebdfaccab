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
    """Result of a trial at a rung."""

    trial_id: int
    """The trial."""
    metric: Num | None
    """Reported metric; null if it was NaN or missing."""
    state: EntryState
    """`promoted`: continued to the next rung. `paused`: may still be promoted. `stopped`: ended at
    this rung. `completed`: reached the highest rung. `failed`: ended early, ranks last."""


class Rung(Resource, frozen=True):
    """Length at which trials are compared."""

    length: int
    """Length in the unit of the search."""
    training: list[int]
    """Trials that train towards it."""
    entries: list[RungEntry]
    """Results at this rung, best first."""


class Bracket(Resource, frozen=True):
    """Rungs with separate lists of trials."""

    trials: int
    """Maximum number of trials, without replacements."""
    rungs: list[Rung]
    """Rungs, lowest first."""


class SearcherState(Resource, frozen=True):
    """Rungs and trials of a search."""

    name: str
    """Name of the searcher."""
    unit: Literal["batches", "epochs"] | None
    """Unit of all lengths; null if trials decide their lengths."""
    metric: str | None
    """Metric that compares trials; null for a single trial without one."""
    smaller_is_better: bool
    """Whether smaller values of the metric are better."""
    done: bool
    """Whether it creates no more trials."""
    progress: Share
    """0 to 1."""
    brackets: list[Bracket]
    """Brackets; empty if the searcher does not compare trials during training."""
    problem: str | None
    """Why the state is unknown; null if it is known."""


class SearcherAnswer(Resource, frozen=True):
    """Response with the state of a search."""

    searcher: SearcherState
