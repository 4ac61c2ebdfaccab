"""``async_halving``: one bracket of rungs."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from zerolab.schema.section import PositiveInt
from zerolab.searcher.asha.rung_sizes import MAX_RUNGS, Bracket
from zerolab.searcher.asha.section import HalvingConfig

__all__ = ["AsyncHalvingConfig"]


class AsyncHalvingConfig(HalvingConfig):
    """ASHA: samples, of which the best at each of ``num_rungs`` rungs go on."""

    name: Literal["async_halving"]
    """ASHA: samples, of which the best at each of ``num_rungs`` rungs go on."""

    num_rungs: Annotated[PositiveInt, Field(le=MAX_RUNGS)]
    """How often a trial is compared with others, the end of its training included."""

    follows_growth: ClassVar[frozenset[str]] = frozenset({"num_rungs"})

    def settled(self, before: Self) -> Self:
        """A greater length is another rung, or several."""
        if self.num_rungs != before.num_rungs:
            return self  # they were said
        rungs = before.num_rungs + self.rungs_above(before)
        return self.model_copy(update={"num_rungs": rungs})

    def brackets(self) -> list[Bracket]:
        """One with all trials; without a bound, as many train as one full decision takes."""
        concurrent = self.max_concurrent_trials or int(self.divisor ** (self.num_rungs - 1))
        return [Bracket(self.num_rungs, self.max_trials, min(concurrent, self.max_trials))]
