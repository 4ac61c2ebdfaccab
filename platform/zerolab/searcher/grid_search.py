"""``grid``: every combination of the points that the file says."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, ClassVar, Literal

from zerolab.schema.hyperparameters import grid_size, space_problems
from zerolab.schema.space import Space
from zerolab.searcher.interface import Searcher
from zerolab.searcher.predefined import ListedSearcher
from zerolab.searcher.section import SearcherConfig

__all__ = ["GridConfig"]


class GridConfig(SearcherConfig):
    """Every combination."""

    name: Literal["grid"]
    """Every combination."""

    may_grow: ClassVar[frozenset[str]] = frozenset({"max_length"})
    continues_ended: ClassVar[bool] = True

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """Every range needs its number of points."""
        told = space_problems(space, grid=True)
        yield from told
        if not told:
            yield from self.begin_problems(grid_size(space))

    def outline(self, space: Mapping[str, Any]) -> str:
        """As many as there are combinations."""
        return f"a grid of {grid_size(space)} trials"

    def forecast(self, space: Mapping[str, Any]) -> dict[int, int]:
        """Every combination goes all the way."""
        return {self.length: grid_size(space)}

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """A list of the points, in the order of the space's names."""
        dimensions = Space(space)
        points = dimensions.grid()  # filled in one by one: all of them may be large

        def point(_trial_id: int, _rng: Random) -> dict[str, Any]:
            return next(points)

        concurrent = self.max_concurrent_trials
        return ListedSearcher(
            point, dimensions.grid_size(), concurrent, seed, self.length, replaces_invalid=False
        )
