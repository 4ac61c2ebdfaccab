"""``random``: as many samples of the space as the file says."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from zerolab.schema.section import PositiveInt
from zerolab.schema.space import MAX_TRIALS, Space
from zerolab.searcher.interface import Searcher
from zerolab.searcher.predefined import ListedSearcher
from zerolab.searcher.section import SearcherConfig

__all__ = ["RandomConfig"]


class RandomConfig(SearcherConfig):
    """Samples of the space."""

    name: Literal["random"]
    """``max_trials`` samples."""

    max_trials: Annotated[PositiveInt, Field(le=MAX_TRIALS)]
    """How many trials there are."""

    may_grow: ClassVar[frozenset[str]] = frozenset({"max_length", "max_trials"})
    is_independent: ClassVar[bool] = True
    continues_ended: ClassVar[bool] = True

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """All of them may begin at once, if they are not too many."""
        yield from super().problems(space)
        yield from self.begin_problems(self.max_trials)

    def outline(self, space: Mapping[str, Any]) -> str:
        """As many as the file says."""
        del space
        return f"{self.max_trials} trials"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Every trial goes all the way."""
        del space
        return {self.length: self.max_trials}

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """A list of samples, one from each trial's own randomness."""
        dimensions = Space(space)

        def sample(_trial_id: int, rng: Random) -> dict[str, Any]:
            return dimensions.sample(rng)

        total, concurrent = self.max_trials, self.max_concurrent_trials
        return ListedSearcher(sample, total, concurrent, seed, self.length, replaces_invalid=True)
