"""``single``: one trial, with the hyperparameters that the file says."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, ClassVar, Literal

from zerolab.schema.hyperparameters import needs_search, sample_hyperparameters
from zerolab.searcher.interface import Searcher
from zerolab.searcher.predefined import ListedSearcher
from zerolab.searcher.section import MetricName, SearcherConfig

__all__ = ["SingleConfig"]

_SEARCHING = "tpe_asha (the recommended one), adaptive_asha, async_halving, pbt, random or grid"


class SingleConfig(SearcherConfig):
    """One trial."""

    name: Literal["single"]
    """One trial."""

    metric: MetricName | None = None
    """The validation metric that says which validation and which checkpoint are the best. Leave it
    out where nothing is validated."""

    has_one_trial: ClassVar[bool] = True
    may_grow: ClassVar[frozenset[str]] = frozenset({"max_length"})
    is_independent: ClassVar[bool] = True
    continues_ended: ClassVar[bool] = True

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """A range has no one value."""
        yield from super().problems(space)
        searched = needs_search(space)
        if searched:
            yield (
                f"searcher.name: must be {_SEARCHING} where hyperparameters are searched, "
                f"got 'single' with {', '.join(searched)}"
            )

    def outline(self, space: Mapping[str, Any]) -> str:
        """Always the same."""
        del space
        return "1 trial"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """One trial, all the way."""
        del space
        return {self.length: 1}

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """A list of one."""

        def sample(_trial_id: int, rng: Random) -> dict[str, Any]:
            return sample_hyperparameters(space, rng)

        return ListedSearcher(sample, 1, 1, seed, self.length, replaces_invalid=False)
