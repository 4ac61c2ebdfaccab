"""The ``searcher`` block of ``tpe_asha``."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from zerolab.schema.hyperparameters import MAX_TRIALS
from zerolab.schema.section import PositiveInt
from zerolab.searcher.interface import Searcher
from zerolab.searcher.operations import Operation
from zerolab.searcher.section import SearcherConfig

__all__ = ["TpeAshaConfig"]


class TpeAshaConfig(SearcherConfig):
    """Many short trials, the best of them longer, each new one where good ones lie."""

    name: Literal["tpe_asha"]
    """``max_trials`` trials, of which the best go on to ``max_length``; the recommended one."""

    max_trials: Annotated[PositiveInt, Field(le=MAX_TRIALS)]
    """How many trials there are."""

    premise: ClassVar[str | None] = (
        "what is usual: the search learns, so later trials are better than those before them, and "
        "three of four go on. It may be a third less, or half as much again"
    )
    may_grow: ClassVar[frozenset[str]] = frozenset({"max_trials", "max_length"})

    def growth_problems(self, before: Self) -> Iterator[str]:
        """The length so far must be a rung of the ladder to the greater one."""
        told = list(super().growth_problems(before))
        yield from told
        if not told and before.length not in self.validate_at():
            times = ", ".join(str(before.length * factor) for factor in (3, 9, 27))
            yield (
                f"searcher.max_length: must be 3, 9 or 27 times the {before.length} {before.unit} "
                f"before ({times}), so that trials are compared with those that there are, "
                f"got {self.length}"
            )

    def grow(self, searcher: Searcher, lost: Collection[int]) -> list[Operation]:
        """More trials, and rungs above those that there are."""
        from zerolab.searcher.tpe.search import TpeAshaSearcher

        assert isinstance(searcher, TpeAshaSearcher)
        return searcher.grow(self.length, self.max_trials, lost)

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """The rungs need a length, and learning needs trials that wait for others."""
        yield from super().problems(space)
        if self.full_length is None:
            yield (
                "searcher.max_length: is required by the tpe_asha searcher, got nothing; "
                "say how far the best trials train"
            )
        if not self.max_concurrent_trials:
            yield (
                "searcher.max_concurrent_trials: must be at least 1 for the tpe_asha searcher, "
                "got 0; trials that all begin at once learn nothing from each other"
            )

    def validate_at(self) -> tuple[int, ...]:
        """At every rung."""
        # numpy takes longer to import than most commands of the command line take
        from zerolab.searcher.tpe.ladder import make_levels

        return tuple(make_levels(max(self.length, 1)))

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """As many as usually do."""
        # numpy takes longer to import than most commands of the command line take
        from zerolab.searcher.tpe.ladder import forecast

        del space
        return forecast(self.length, self.max_trials)

    def most_length(self, space: Mapping[str, Any]) -> int:
        """Everybody to the end: nearly so it is when each trial is better than those before it."""
        del space
        return self.max_trials * self.length

    def outline(self, space: Mapping[str, Any]) -> str:
        """As many as the file says, and where they are judged."""
        del space
        lengths = ", ".join(map(str, self.validate_at()))
        return f"{self.max_trials} trials, judged after {lengths} {self.unit}"

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """A ladder, and a model of what was judged on it."""
        # numpy takes longer to import than most commands of the command line take
        from zerolab.searcher.tpe.search import TpeAshaSearcher

        return TpeAshaSearcher(
            space,
            self.length,
            self.max_trials,
            self.max_concurrent_trials,
            seed,
            smaller_is_better=self.smaller_is_better,
        )
