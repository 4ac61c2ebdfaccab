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
    """Many short trials, of which the best are promoted; new ones start near good ones."""

    name: Literal["tpe_asha"]
    """``max_trials`` trials, of which the best train to ``max_length``; the recommended
    searcher."""

    max_trials: Annotated[PositiveInt, Field(le=MAX_TRIALS)]
    """Number of trials, without those that are replaced because of ``InvalidHP``."""

    premise: ClassVar[str | None] = (
        "The table shows a typical search, in which later trials are better than earlier ones. "
        "Most searches cost between two thirds of this estimate and one and a half times as much."
    )
    growable_fields: ClassVar[frozenset[str]] = frozenset({"max_trials", "max_length"})

    def growth_problems(self, before: Self) -> Iterator[str]:
        """Report a length whose ladder does not contain the previous length."""
        problems = list(super().growth_problems(before))
        yield from problems
        if not problems and before.length not in self.validate_at():
            times = ", ".join(str(before.length * factor) for factor in (3, 9, 27))
            yield (
                f"searcher.max_length: must be 3, 9 or 27 times the {before.length} {before.unit} "
                f"before ({times}), so that new trials are comparable with earlier ones, "
                f"got {self.length}"
            )

    def grow(self, searcher: Searcher, lost: Collection[int]) -> list[Operation]:
        """Add trials, and rungs above the existing ones."""
        from zerolab.extensions.searcher_tpe.search import TpeAshaSearcher

        assert isinstance(searcher, TpeAshaSearcher)
        return searcher.grow(self.length, self.max_trials, lost)

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """Report a missing length, and unlimited concurrency."""
        yield from super().problems(space)
        if self.full_length is None:
            yield (
                "searcher.max_length: is required by the tpe_asha searcher, got nothing; "
                "set the length of the best trials"
            )
        if not self.max_concurrent_trials:
            yield (
                "searcher.max_concurrent_trials: must be at least 1 for the tpe_asha searcher, "
                "got 0; trials that all start at once cannot learn from each other"
            )

    def validate_at(self) -> tuple[int, ...]:
        """Return the lengths of all rungs."""
        # imported lazily: numpy takes longer to import than most CLI commands run
        from zerolab.extensions.searcher_tpe.ladder import make_levels

        return tuple(make_levels(max(self.length, 1)))

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Estimate from typical promotion rates."""
        # imported lazily: numpy takes longer to import than most CLI commands run
        from zerolab.extensions.searcher_tpe.ladder import forecast

        del space
        return forecast(self.length, self.max_trials)

    def most_length(self, space: Mapping[str, Any]) -> int:
        """Return the length of all trials at full length: each may be better than all before it."""
        del space
        return self.max_trials * self.length

    def outline(self, space: Mapping[str, Any]) -> str:
        """Describe the number of trials and their rungs."""
        del space
        lengths = ", ".join(map(str, self.validate_at()))
        return f"{self.max_trials} trials, judged after {lengths} {self.unit}"

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make the searcher; numpy is imported here."""
        # imported lazily: numpy takes longer to import than most CLI commands run
        from zerolab.extensions.searcher_tpe.search import TpeAshaSearcher

        return TpeAshaSearcher(
            space,
            self.length,
            self.max_trials,
            self.max_concurrent_trials,
            seed,
            smaller_is_better=self.smaller_is_better,
        )
