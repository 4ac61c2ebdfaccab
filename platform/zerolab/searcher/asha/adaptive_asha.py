"""``adaptive_asha``: several brackets, which stop trials early or late."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from zerolab.schema.section import PositiveInt
from zerolab.searcher.asha.rung_sizes import MAX_RUNGS, Bracket, Mode, make_brackets
from zerolab.searcher.asha.section import HalvingConfig

__all__ = ["AdaptiveAshaConfig"]


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
