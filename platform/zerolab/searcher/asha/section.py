"""Sections of the searchers ``async_halving`` and ``adaptive_asha``."""

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from zerolab.schema.lengths import LONGEST, Length
from zerolab.schema.section import PositiveInt
from zerolab.schema.space import MAX_TRIALS, Space
from zerolab.searcher.asha.brackets import MultiBracketSearcher
from zerolab.searcher.asha.promotion import PromotingRungs, StoppingRungs
from zerolab.searcher.asha.rung_sizes import (
    MAX_DIVISOR,
    MAX_RUNGS,
    Bracket,
    Mode,
    make_brackets,
    make_rungs,
    simulate,
)
from zerolab.searcher.interface import Searcher
from zerolab.searcher.operations import Operation
from zerolab.searcher.section import SearcherConfig

__all__ = ["AdaptiveAshaConfig", "AsyncHalvingConfig", "HalvingConfig"]


class HalvingConfig(SearcherConfig):
    """ASHA: trials are compared at rungs, and the best are promoted."""

    max_trials: Annotated[PositiveInt, Field(le=MAX_TRIALS)]
    """Number of trials, without those that are replaced because of ``InvalidHP``."""

    max_time: Annotated[PositiveInt, Field(le=LONGEST)] | None = None
    """Maximum length of each trial, in the unit of ``time_metric``; replaces ``max_length``."""

    time_metric: Literal["batches", "epochs"] | None = None
    """The unit of ``max_time``."""

    divisor: Annotated[float, Field(gt=1, le=MAX_DIVISOR)] = 4.0
    """One of ``divisor`` trials of a rung is promoted; each rung is ``divisor`` times as long as
    the one below it."""

    stop_once: bool = True
    """Whether trials train on until they are stopped. If false they pause at each rung, and the
    best continue from their checkpoints."""

    premise: ClassVar[str | None] = (
        "The table assumes that all trials reach a length at the same time. Each trial is compared "
        "only with earlier ones, so more may be promoted."
    )
    growable_fields: ClassVar[frozenset[str]] = frozenset({"max_trials", "max_length", "max_time"})

    @property
    def length_field(self) -> str:
        """Whichever of the two length fields is set."""
        return "max_length" if self.max_time is None else "max_time"

    @property
    def full_length(self) -> Length | None:
        """Length from ``max_time`` or ``max_length``."""
        if self.max_time is None or self.time_metric is None:
            return self.max_length
        return Length.model_validate({self.time_metric: self.max_time})

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """Report a length that is missing or set twice."""
        yield from super().problems(space)
        if self.max_time is not None and self.max_length is not None and not self.time_metric:
            yield (
                f"searcher.max_time: must not be combined with max_length without time_metric, got "
                f"{self.max_time} and {self.max_length.model_dump()}; remove one of the two"
            )
        elif (self.max_time is None) != (self.time_metric is None):
            present, required = ("max_time", "time_metric")
            if self.max_time is None:
                present, required = required, present
            yield f"searcher.{required}: is required with {present}, got nothing"
        elif self.full_length is None:
            yield (
                f"searcher.max_time: is required by the {self.name} searcher, got nothing; set the "
                "maximum length of a trial, e.g. max_time: 1000 and time_metric: batches"
            )
        elif self.max_length is not None and self.max_length != self.full_length:
            yield (
                "searcher.max_length: must not be another length than max_time "
                f"({self.max_time} {self.time_metric}), got {self.max_length.model_dump()}"
            )
        if self.length:
            brackets = self.brackets()
            yield from self.initial_trials_problems(
                sum(bracket.max_concurrent_trials for bracket in brackets)
            )

    @abstractmethod
    def brackets(self) -> list[Bracket]:
        """Return the brackets, in the order in which they get their trials."""

    def validate_at(self) -> tuple[int, ...]:
        """Return the lengths of every rung of every bracket."""
        rungs = {length for bracket in self.brackets() for length in self._rungs(bracket)}
        return tuple(sorted(rungs))

    def outline(self, space: Mapping[str, Any]) -> str:
        """Describe the number of trials and their rungs."""
        del space
        trials = sum(bracket.max_trials for bracket in self.brackets())
        lengths = ", ".join(map(str, self.validate_at()))
        return f"{trials} trials, compared after {lengths} {self.unit}"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Estimate from the arithmetic of the rungs."""
        del space
        return simulate(self.brackets(), self.divisor, self.length)

    def most_length(self, space: Mapping[str, Any]) -> int:
        """Return the length of all trials at full length: each may be better than all before it."""
        del space
        return sum(bracket.max_trials for bracket in self.brackets()) * self.length

    def rungs_above(self, before: Self) -> int:
        """Return how many rungs the greater length adds to those of another section."""
        ratio = self.length / before.length if before.length else 1.0
        return max(round(math.log(ratio, self.divisor)), 0) if ratio > 1 else 0

    def growth_problems(self, before: Self) -> Iterator[str]:
        """Report lengths that would move the rungs at which trials were already compared."""
        problems = list(super().growth_problems(before))
        yield from problems
        if problems or self.keeps_rungs(before):
            return
        previous = {field: getattr(before, field) for field in self.derived_fields}
        following = self.model_copy(update=previous).with_derived_fields(before)
        if following.keeps_rungs(before):
            for field in sorted(self.derived_fields):
                yield (
                    f"searcher.{field}: must be {getattr(following, field)}, which follows from "
                    f"{self.length_field} = {self.length}, so that the rungs of earlier "
                    f"comparisons stay; leave it unchanged, got {getattr(self, field)}"
                )
        else:
            powers = [before.length * self.divisor**power for power in (1, 2)]
            examples = ", ".join(f"{power:g}" for power in powers)
            yield (
                f"searcher.{self.length_field}: must be {before.length} times a power of the "
                f"divisor ({examples}, ...), so that the rungs of earlier comparisons stay "
                f"({', '.join(map(str, before.validate_at()))}), got {self.length}"
            )

    def keeps_rungs(self, before: Self) -> bool:
        """Whether every bracket keeps its rungs, and adds some above if it is longer."""
        old = [before._rungs(bracket) for bracket in before.brackets()]
        new = [self._rungs(bracket) for bracket in self.brackets()]
        return len(old) == len(new) and all(
            longer[: len(shorter)] == shorter
            and (len(longer) > len(shorter)) == (self.length > before.length)
            for shorter, longer in zip(old, new, strict=True)
        )

    def grow(self, searcher: Searcher, lost: Collection[int]) -> list[Operation]:
        """Add trials to each bracket, and rungs above the existing ones."""
        assert isinstance(searcher, MultiBracketSearcher)
        rungs = [
            (self._rungs(bracket), bracket.max_concurrent_trials) for bracket in self.brackets()
        ]
        return searcher.grow(self.max_trials, rungs, lost)

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make a searcher over the brackets."""
        kind = StoppingRungs if self.stop_once else PromotingRungs
        brackets: Sequence[StoppingRungs | PromotingRungs] = [
            kind(self._rungs(bracket), self.divisor, *bracket[1:]) for bracket in self.brackets()
        ]
        return MultiBracketSearcher(
            brackets, Space(space), seed, self.max_concurrent_trials,
            smaller_is_better=self.smaller_is_better,
        )  # fmt: skip

    def _rungs(self, bracket: Bracket) -> list[int]:
        return make_rungs(bracket.num_rungs, self.divisor, self.length)


class AdaptiveAshaConfig(HalvingConfig):
    """Several brackets of ASHA, which stop trials early or late."""

    name: Literal["adaptive_asha"]
    """Several brackets of ASHA, some of which stop trials early and some late."""

    mode: Mode = "standard"
    """When trials are stopped: ``aggressive`` is one bracket with all rungs; ``standard`` adds
    brackets with at least half of them; ``conservative`` adds those down to one rung."""

    max_rungs: Annotated[PositiveInt, Field(le=MAX_RUNGS)] = 5
    """Maximum number of rungs of a bracket."""

    bracket_rungs: Annotated[
        list[Annotated[PositiveInt, Field(le=MAX_RUNGS)]], Field(max_length=MAX_RUNGS)
    ] = Field(default_factory=list)
    """Rungs of each bracket; replaces those of ``mode``."""

    derived_fields: ClassVar[frozenset[str]] = frozenset({"bracket_rungs"})

    def with_derived_fields(self, before: Self) -> Self:
        """Keep the existing brackets, and add rungs for a greater length."""
        if self.bracket_rungs != before.bracket_rungs:
            return self  # set by the user
        above = self.rungs_above(before)
        rungs = [bracket.num_rungs + above for bracket in before.brackets()]
        return self.model_copy(update={"bracket_rungs": rungs})

    def brackets(self) -> list[Bracket]:
        """Return the brackets that follow from the mode."""
        return make_brackets(
            max_time=self.length,
            max_trials=self.max_trials,
            divisor=self.divisor,
            mode=self.mode,
            max_rungs=self.max_rungs,
            max_concurrent_trials=self.max_concurrent_trials,
            bracket_rungs=self.bracket_rungs,
        )


class AsyncHalvingConfig(HalvingConfig):
    """ASHA: random samples, of which the best at each of ``num_rungs`` rungs are promoted."""

    name: Literal["async_halving"]
    """ASHA: random samples, of which the best at each of ``num_rungs`` rungs are promoted."""

    num_rungs: Annotated[PositiveInt, Field(le=MAX_RUNGS)]
    """Number of rungs at which a trial is compared with others, including the end of its
    training."""

    derived_fields: ClassVar[frozenset[str]] = frozenset({"num_rungs"})

    def with_derived_fields(self, before: Self) -> Self:
        """Add rungs for a greater length."""
        if self.num_rungs != before.num_rungs:
            return self  # set by the user
        rungs = before.num_rungs + self.rungs_above(before)
        return self.model_copy(update={"num_rungs": rungs})

    def brackets(self) -> list[Bracket]:
        """Return one bracket; without a limit its concurrency is that of one full decision."""
        concurrent = self.max_concurrent_trials or int(self.divisor ** (self.num_rungs - 1))
        return [Bracket(self.num_rungs, self.max_trials, min(concurrent, self.max_trials))]
