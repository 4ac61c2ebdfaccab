"""Searches: where their trials stand, what one would cost, and what a custom searcher is told."""

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
    """In the unit of the search."""
    training: list[int]
    """Trials on their way to it."""
    entries: list[RungEntry]
    """Trials that were judged there, best first."""


class Bracket(Resource, frozen=True):
    """Rungs with lists of their own."""

    trials: int
    """How many trials it has at most, if none has to be replaced."""
    rungs: list[Rung]
    """The lowest first."""


class SearcherState(Resource, frozen=True):
    """Where the trials of a search stand."""

    name: str
    """Which searcher."""
    unit: Literal["batches", "epochs"] | None
    """Of all lengths; null when trials decide by themselves how far they train."""
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
    """In the unit of the search."""
    trials: int
    """How many end there."""


class SearchPreview(Resource, frozen=True):
    """What a search would come to."""

    outline: str
    """In a few words."""
    trials: int | None
    """How many there are; null when the searcher cannot say."""
    unit: Literal["batches", "epochs"] | None
    """Of all lengths; null when trials decide by themselves how far they train."""
    lengths: list[PreviewLength]
    """Which trials end where, under the premise."""
    total_length: int | None
    """Over all trials, under the premise; null when nobody can say."""
    most_length: int | None
    """Over all trials, if all trained on that may; null when nobody can say."""
    slots_per_trial: int
    """Slots that each trial holds while it trains."""
    seconds_per_unit: float | None
    """How long one batch, or one epoch, of a trial takes; null when nobody knows."""
    like: int | None
    """The experiment from which that is known; null when it was given."""
    slot_hours: float | None
    """What all trials hold together, for `total_length`; null when a time or a length is
    unknown."""
    most_slot_hours: float | None
    """The same for `most_length`."""
    premise: str | None
    """When so many end where; null when it is certain, or nobody can say."""
    warnings: list[str]
    """What of the search is probably a mistake, a line each."""


class PreviewAnswer(Resource, frozen=True):
    """What a search would come to."""

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
