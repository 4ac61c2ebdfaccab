"""``single``: one trial with fixed hyperparameters."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, ClassVar, Literal

from zerolab.schema.hyperparameters import needs_search, sample_hyperparameters
from zerolab.searcher.interface import Searcher
from zerolab.searcher.predefined import FixedTrialsSearcher
from zerolab.searcher.section import MetricName, SearcherConfig

__all__ = ["SingleConfig"]

_SEARCHING = "tpe_asha (the recommended one), adaptive_asha, async_halving, pbt, random or grid"


class SingleConfig(SearcherConfig):
    """One trial."""

    name: Literal["single"]
    """One trial."""

    metric: MetricName | None = None
    """The validation metric that selects the best validation and the best checkpoint. Leave it out
    when nothing is validated."""

    has_one_trial: ClassVar[bool] = True
    growable_fields: ClassVar[frozenset[str]] = frozenset({"max_length"})
    has_independent_trials: ClassVar[bool] = True
    rebuilds_on_growth: ClassVar[bool] = True

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """Report hyperparameters that are ranges: a single trial needs constants."""
        yield from super().problems(space)
        searched = needs_search(space)
        if searched:
            yield (
                f"searcher.name: must be {_SEARCHING} where hyperparameters are searched, "
                f"got 'single' with {', '.join(searched)}"
            )

    def outline(self, space: Mapping[str, Any]) -> str:
        """Describe the single trial."""
        del space
        return "1 trial"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Return one trial of full length."""
        del space
        return {self.length: 1}

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make a searcher with one trial."""

        def sample(_trial_id: int, rng: Random) -> dict[str, Any]:
            return sample_hyperparameters(space, rng)

        return FixedTrialsSearcher(sample, 1, 1, seed, self.length, replaces_invalid=False)
