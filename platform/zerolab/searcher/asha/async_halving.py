"""``async_halving``: ASHA with one bracket."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from zerolab.schema.section import PositiveInt
from zerolab.searcher.asha.rung_sizes import MAX_RUNGS, Bracket
from zerolab.searcher.asha.section import HalvingConfig

__all__ = ["AsyncHalvingConfig"]


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
