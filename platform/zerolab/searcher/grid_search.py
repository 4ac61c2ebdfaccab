"""``grid``: every combination of the points of the space."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, ClassVar, Literal

from zerolab.schema.hyperparameters import grid_size, space_problems
from zerolab.schema.space import Space
from zerolab.searcher.interface import Searcher
from zerolab.searcher.predefined import FixedTrialsSearcher
from zerolab.searcher.section import SearcherConfig

__all__ = ["GridConfig"]


class GridConfig(SearcherConfig):
    """One trial for every combination of hyperparameters."""

    name: Literal["grid"]
    """One trial for every combination of hyperparameters."""

    growable_fields: ClassVar[frozenset[str]] = frozenset({"max_length"})
    rebuilds_on_growth: ClassVar[bool] = True

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """Report ranges without a number of points, and too many initial trials."""
        grid_problems = space_problems(space, grid=True)
        yield from grid_problems
        if not grid_problems:
            yield from self.initial_trials_problems(grid_size(space))

    def outline(self, space: Mapping[str, Any]) -> str:
        """Describe the size of the grid."""
        return f"a grid of {grid_size(space)} trials"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Return the number of combinations at full length."""
        return {self.length: grid_size(space)}

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make a searcher over the grid points, in the order of the space's names."""
        dimensions = Space(space)
        points = dimensions.grid()  # generated lazily: the grid may be large

        def point(_trial_id: int, _rng: Random) -> dict[str, Any]:
            return next(points)

        concurrent = self.max_concurrent_trials
        return FixedTrialsSearcher(
            point, dimensions.grid_size(), concurrent, seed, self.length, replaces_invalid=False
        )
