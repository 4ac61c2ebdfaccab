"""``random``: a fixed number of random samples of the space."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from zerolab.schema.section import PositiveInt
from zerolab.schema.space import MAX_TRIALS, Space
from zerolab.searcher.interface import Searcher
from zerolab.searcher.predefined import FixedTrialsSearcher
from zerolab.searcher.section import SearcherConfig

__all__ = ["RandomConfig"]


class RandomConfig(SearcherConfig):
    """Random samples of the space."""

    name: Literal["random"]
    """``max_trials`` random samples of the space."""

    max_trials: Annotated[PositiveInt, Field(le=MAX_TRIALS)]
    """Number of trials, without those that are replaced because of ``InvalidHP``."""

    growable_fields: ClassVar[frozenset[str]] = frozenset({"max_length", "max_trials"})
    has_independent_trials: ClassVar[bool] = True
    rebuilds_on_growth: ClassVar[bool] = True

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """Report too many initial trials."""
        yield from super().problems(space)
        yield from self.initial_trials_problems(self.max_trials)

    def outline(self, space: Mapping[str, Any]) -> str:
        """Describe the number of trials."""
        del space
        return f"{self.max_trials} trials"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Return all trials at full length."""
        del space
        return {self.length: self.max_trials}

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make a searcher that draws each trial from its own random generator."""
        dimensions = Space(space)

        def sample(_trial_id: int, rng: Random) -> dict[str, Any]:
            return dimensions.sample(rng)

        total, concurrent = self.max_trials, self.max_concurrent_trials
        return FixedTrialsSearcher(
            sample, total, concurrent, seed, self.length, replaces_invalid=True
        )
