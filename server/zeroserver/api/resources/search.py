"""Resources of searches: rungs, preview, custom searchers."""

from typing import Literal

from zerolab.searcher.view import EntryState
from zeroserver.api.rows import Num, Resource, Share

__all__ = [
    "Bracket",
    "PreviewAnswer",
    "PreviewLength",
    "Rung",
    "RungEntry",
    "SearchEvent",
    "SearchEvents",
    "SearchHandled",
    "SearchPreview",
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


class PreviewLength(Resource, frozen=True):
    """Trials that end at one length."""

    length: int
    """Length in the unit of the search."""
    trials: int
    """Number of trials that end there."""


class SearchPreview(Resource, frozen=True):
    """Estimate of a search's trials and cost."""

    outline: str
    """Short summary."""
    trials: int | None
    """Number of trials; null if the searcher does not know it."""
    unit: Literal["batches", "epochs"] | None
    """Unit of all lengths; null if trials decide their lengths."""
    lengths: list[PreviewLength]
    """Expected numbers of trials by final length."""
    total_length: int | None
    """Expected sum over all trials; null if unknown."""
    most_length: int | None
    """Maximum sum over all trials; null if unknown."""
    slots_per_trial: int
    """Slots that each trial holds while it trains."""
    seconds_per_unit: float | None
    """Time of one batch or one epoch; null if unknown."""
    like: int | None
    """Experiment that this time is taken from; null if it was given."""
    slot_hours: float | None
    """What all trials hold together, for `total_length`; null when a time or a length is
    unknown."""
    most_slot_hours: float | None
    """The same for `most_length`."""
    premise: str | None
    """Assumption of the estimate; null if it is exact or unknown."""
    warnings: list[str]
    """Probable mistakes of the search, one line each."""


class PreviewAnswer(Resource, frozen=True):
    """Estimate of a search's trials and cost."""

    preview: SearchPreview


class SearchEvent(Resource, frozen=True):
    """Something that a searcher must know."""

    id: int
    """Rising; not without gaps."""
    kind: Literal["created", "validated", "exited", "exited_early"]
    """What happened to the trial."""
    trial_id: int
    """The searcher's own number of the trial, as it said at its creation."""
    metric: Num | None
    """Of `validated`; `NaN` ranks last."""
    length: float | None
    """Of `validated`: how far the trial was, in the unit of the search."""
    reason: str | None
    """Of `exited_early`: `errored`, `invalid_hp` or `user_canceled`."""


class SearchEvents(Resource, frozen=True):
    """Events of a search, the oldest first."""

    events: list[SearchEvent]
    """At most 1,000."""
    handled: int
    """The last event that operations answered; -1 before the first operations, 0 after them."""
    over: bool
    """Whether the experiment takes no more operations."""


class SearchHandled(Resource, frozen=True):
    """What operations have answered."""

    handled: int
    """The last event that is answered by now."""
