"""Estimate of a search's trials and cost (dry run)."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Preview"]


@dataclass(frozen=True)
class Preview:
    """Estimated trials by length, and their cost.

    Searchers that compare trials can only estimate under a premise, and give a maximum: more trials
    are promoted when later ones are better.
    """

    outline: str
    """Short description of the trials."""
    unit: Literal["batches", "epochs"] | None
    """Unit of all lengths; None when trials decide by themselves how long they train."""
    lengths: dict[int, int]
    """Length to the number of trials that end there; empty when the searcher cannot estimate it."""
    most_length: int | None
    """Maximum total length over all trials, in the unit of the lengths; None when unknown."""
    slots: int
    """Slots of each trial."""
    seconds_per_unit: float | None = None
    """Seconds that a trial needs for one batch or one epoch; None when unknown."""
    like: int | None = None
    """Experiment whose speed was used; None when the time was given."""
    warnings: tuple[str, ...] = ()
    """Probable mistakes in the search's configuration."""
    premise: str | None = None
    """Assumption under which ``lengths`` holds; None when it is certain or unknown."""

    @property
    def trials(self) -> int | None:
        """Number of trials; None when the searcher cannot estimate it."""
        return sum(self.lengths.values()) if self.lengths else None

    @property
    def total_length(self) -> int | None:
        """Total length over all trials, in the unit of the lengths; None when unknown."""
        if not self.lengths or self.unit is None:
            return None
        return sum(length * number for length, number in self.lengths.items())

    @property
    def slot_hours(self) -> float | None:
        """Slot hours of all trials; None when a time or a length is unknown."""
        return self._hours(self.total_length)

    @property
    def most_slot_hours(self) -> float | None:
        """Slot hours for the maximum total length; None when unknown."""
        return self._hours(self.most_length)

    def _hours(self, length: int | None) -> float | None:
        if length is None or self.seconds_per_unit is None:
            return None
        return length * self.seconds_per_unit * self.slots / 3600
