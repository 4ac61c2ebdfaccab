"""What the sections of ``async_halving`` and ``adaptive_asha`` share."""

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from zerolab.schema.lengths import LONGEST, Length
from zerolab.schema.section import PositiveInt
from zerolab.schema.space import MAX_TRIALS, Space
from zerolab.searcher.asha.brackets import Tournament
from zerolab.searcher.asha.promotion import PromotingRungs
from zerolab.searcher.asha.rung_sizes import MAX_DIVISOR, Bracket, make_rungs, simulate
from zerolab.searcher.asha.stopping import StoppingRungs
from zerolab.searcher.interface import Searcher
from zerolab.searcher.operations import Operation
from zerolab.searcher.section import SearcherConfig

__all__ = ["HalvingConfig"]


class HalvingConfig(SearcherConfig):
    """Trials are compared at rungs, and the best of each go on."""

    max_trials: Annotated[PositiveInt, Field(le=MAX_TRIALS)]
    """How many trials there are."""

    max_time: Annotated[PositiveInt, Field(le=LONGEST)] | None = None
    """How far each trial trains at most, in the unit that ``time_metric`` names; in place of
    ``max_length``."""

    time_metric: Literal["batches", "epochs"] | None = None
    """The unit of ``max_time``."""

    divisor: Annotated[float, Field(gt=1, le=MAX_DIVISOR)] = 4.0
    """Of the trials of a rung, one in so many goes on; each rung is so many times as long as the
    one below it."""

    stop_once: bool = True
    """Whether trials train on until they are stopped; if false they pause at each rung, and the
    best go on from their checkpoints."""

    premise: ClassVar[str | None] = (
        "if all come to a length at the same time. Each is compared with those before it alone, so "
        "more may go on"
    )
    may_grow: ClassVar[frozenset[str]] = frozenset({"max_trials", "max_length", "max_time"})

    @property
    def length_field(self) -> str:
        """The one that is given."""
        return "max_length" if self.max_time is None else "max_time"

    @property
    def full_length(self) -> Length | None:
        """What ``max_time`` or ``max_length`` says."""
        if self.max_time is None or self.time_metric is None:
            return self.max_length
        return Length.model_validate({self.time_metric: self.max_time})

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """The length must be said, and once."""
        yield from super().problems(space)
        if self.max_time is not None and self.max_length is not None and not self.time_metric:
            yield (
                f"searcher.max_time: must not stand beside max_length without time_metric, got "
                f"{self.max_time} and {self.max_length.model_dump()}; remove one of the two"
            )
        elif (self.max_time is None) != (self.time_metric is None):
            given, other = ("max_time", "time_metric")
            if self.max_time is None:
                given, other = other, given
            yield f"searcher.{other}: is required beside {given}, got nothing"
        elif self.full_length is None:
            yield (
                f"searcher.max_time: is required by the {self.name} searcher, got nothing; say how "
                "far a trial trains at most, e.g. max_time: 1000 and time_metric: batches"
            )
        elif self.max_length is not None and self.max_length != self.full_length:
            yield (
                "searcher.max_length: must not be another length than max_time "
                f"({self.max_time} {self.time_metric}), got {self.max_length.model_dump()}"
            )
        if self.length:
            brackets = self.brackets()
            yield from self.begin_problems(sum(each.max_concurrent_trials for each in brackets))

    @abstractmethod
    def brackets(self) -> list[Bracket]:
        """The brackets, in the order in which they get their trials."""

    def validate_at(self) -> tuple[int, ...]:
        """At every rung of every bracket."""
        rungs = {length for bracket in self.brackets() for length in self._rungs(bracket)}
        return tuple(sorted(rungs))

    def outline(self, space: Mapping[str, Any]) -> str:
        """How many, and where they are compared."""
        del space
        trials = sum(bracket.max_trials for bracket in self.brackets())
        lengths = ", ".join(map(str, self.validate_at()))
        return f"{trials} trials, compared after {lengths} {self.unit}"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """What the arithmetic of the rungs says."""
        del space
        return simulate(self.brackets(), self.divisor, self.length)

    def most_length(self, space: Mapping[str, Any]) -> int:
        """Everybody to the end: so it is when each trial is better than those before it."""
        del space
        return sum(bracket.max_trials for bracket in self.brackets()) * self.length

    def rungs_above(self, before: Self) -> int:
        """How many rungs the greater length puts above those of another section."""
        ratio = self.length / before.length if before.length else 1.0
        return max(round(math.log(ratio, self.divisor)), 0) if ratio > 1 else 0

    def growth_problems(self, before: Self) -> Iterator[str]:
        """Trials were compared at the rungs that there are: these stay, and others come above."""
        told = list(super().growth_problems(before))
        yield from told
        if told or self.keeps_rungs(before):
            return
        left_out = {field: getattr(before, field) for field in self.follows_growth}
        following = self.model_copy(update=left_out).settled(before)
        if following.keeps_rungs(before):
            for field in sorted(self.follows_growth):
                yield (
                    f"searcher.{field}: must be {getattr(following, field)}, which follows from "
                    f"{self.length_field} = {self.length}, so that the rungs stay at which trials "
                    f"were compared; leave it as it is, got {getattr(self, field)}"
                )
        else:
            powers = [before.length * self.divisor**power for power in (1, 2)]
            next_ones = ", ".join(f"{power:g}" for power in powers)
            yield (
                f"searcher.{self.length_field}: must be {before.length} times a power of the "
                f"divisor ({next_ones}, ...), so that the rungs stay at which trials were compared "
                f"({', '.join(map(str, before.validate_at()))}), got {self.length}"
            )

    def keeps_rungs(self, before: Self) -> bool:
        """Whether every bracket has its rungs so far, with others above them if it is longer."""
        old = [before._rungs(bracket) for bracket in before.brackets()]
        new = [self._rungs(bracket) for bracket in self.brackets()]
        return len(old) == len(new) and all(
            longer[: len(shorter)] == shorter
            and (len(longer) > len(shorter)) == (self.length > before.length)
            for shorter, longer in zip(old, new, strict=True)
        )

    def grow(self, searcher: Searcher, lost: Collection[int]) -> list[Operation]:
        """More trials in each bracket, and rungs above those that it has."""
        assert isinstance(searcher, Tournament)
        rungs = [
            (self._rungs(bracket), bracket.max_concurrent_trials) for bracket in self.brackets()
        ]
        return searcher.grow(self.max_trials, rungs, lost)

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """A tournament of the brackets."""
        kind = StoppingRungs if self.stop_once else PromotingRungs
        brackets: Sequence[StoppingRungs | PromotingRungs] = [
            kind(self._rungs(bracket), self.divisor, *bracket[1:]) for bracket in self.brackets()
        ]
        return Tournament(
            brackets, Space(space), seed, self.max_concurrent_trials,
            smaller_is_better=self.smaller_is_better,
        )  # fmt: skip

    def _rungs(self, bracket: Bracket) -> list[int]:
        return make_rungs(bracket.num_rungs, self.divisor, self.length)
