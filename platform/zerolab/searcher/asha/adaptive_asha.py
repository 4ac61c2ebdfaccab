"""``adaptive_asha``: several brackets, some of which stop trials early and some late."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from zerolab.schema.section import PositiveInt
from zerolab.searcher.asha.rung_sizes import MAX_RUNGS, Bracket, Mode, make_brackets
from zerolab.searcher.asha.section import HalvingConfig

__all__ = ["AdaptiveAshaConfig"]


class AdaptiveAshaConfig(HalvingConfig):
    """Several brackets of ASHA, some of which stop trials early and some late."""

    name: Literal["adaptive_asha"]
    """Several brackets of ASHA, some of which stop trials early and some late."""

    mode: Mode = "standard"
    """How early trials are stopped: ``aggressive`` is one bracket with all rungs; ``standard`` adds
    brackets with at least half of them; ``conservative`` adds those down to one rung."""

    max_rungs: Annotated[PositiveInt, Field(le=MAX_RUNGS)] = 5
    """Most rungs of a bracket."""

    bracket_rungs: Annotated[
        list[Annotated[PositiveInt, Field(le=MAX_RUNGS)]], Field(max_length=MAX_RUNGS)
    ] = Field(default_factory=list)
    """Rungs of each bracket, in place of what ``mode`` says."""

    follows_growth: ClassVar[frozenset[str]] = frozenset({"bracket_rungs"})

    def settled(self, before: Self) -> Self:
        """The brackets that there are stay, with another rung for a greater length, or several."""
        if self.bracket_rungs != before.bracket_rungs:
            return self  # they were said
        above = self.rungs_above(before)
        rungs = [bracket.num_rungs + above for bracket in before.brackets()]
        return self.model_copy(update={"bracket_rungs": rungs})

    def brackets(self) -> list[Bracket]:
        """As the arithmetic has them."""
        return make_brackets(
            max_time=self.length,
            max_trials=self.max_trials,
            divisor=self.divisor,
            mode=self.mode,
            max_rungs=self.max_rungs,
            max_concurrent_trials=self.max_concurrent_trials,
            bracket_rungs=self.bracket_rungs,
        )
