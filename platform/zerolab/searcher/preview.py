"""What a search will come to, said before anything starts."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Preview"]


@dataclass(frozen=True)
class Preview:
    """Trials by length, and what they cost.

    A searcher that compares trials can only say what happens under some premise, and what is the
    most: more of them go on, the better the later ones are.
    """

    outline: str
    """In a few words."""
    unit: Literal["batches", "epochs"] | None
    """Of all lengths; None when trials decide by themselves how far they train."""
    lengths: dict[int, int]
    """Length to the number of trials that end there; empty when the searcher cannot say."""
    most_length: int | None
    """How far all trials train together at most, in the unit of the lengths; None when nobody can
    say."""
    slots: int
    """Of each trial."""
    seconds_per_unit: float | None = None
    """How long one batch, or one epoch, of a trial takes; None when nobody knows."""
    like: int | None = None
    """The experiment from which that is known; None when it was given."""
    warnings: tuple[str, ...] = ()
    """What of the search is probably a mistake."""
    premise: str | None = None
    """When so many end where; None when it is certain, or nobody can say."""

    @property
    def trials(self) -> int | None:
        """How many there are; None when the searcher cannot say."""
        return sum(self.lengths.values()) if self.lengths else None

    @property
    def total_length(self) -> int | None:
        """Over all trials, in the unit of the lengths; None when nobody can say."""
        if not self.lengths or self.unit is None:
            return None
        return sum(length * number for length, number in self.lengths.items())

    @property
    def slot_hours(self) -> float | None:
        """What all trials hold together; None when a time or a length is unknown."""
        return self._hours(self.total_length)

    @property
    def most_slot_hours(self) -> float | None:
        """The same of the most that they may train."""
        return self._hours(self.most_length)

    def _hours(self, length: int | None) -> float | None:
        if length is None or self.seconds_per_unit is None:
            return None
        return length * self.seconds_per_unit * self.slots / 3600
