"""The ``searcher`` block of an experiment file: what all searchers share."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from zerolab.schema.hyperparameters import space_problems
from zerolab.schema.lengths import Length
from zerolab.schema.section import NonNegativeInt, Section
from zerolab.searcher.interface import Searcher

__all__ = ["SearcherConfig"]


class SearcherConfig(Section):
    """Which trials there are, and how far each one trains; one subclass for each searcher."""

    name: str
    """Which searcher."""

    metric: str
    """The validation metric by which trials are compared."""

    smaller_is_better: bool = True
    """Whether a smaller metric is the better one."""

    max_length: Length | None = None
    """How far each trial trains: ``{batches: n}``, ``{epochs: n}`` or a number of batches.
    Required unless the entrypoint is a command."""

    max_concurrent_trials: NonNegativeInt = 16
    """How many trials exist at a time; 0 means all."""

    has_one_trial: ClassVar[bool] = False
    """Whether the experiment is as far as its only trial."""

    @property
    def length(self) -> int:
        """How far a trial trains, in its unit; 0 when it decides by itself."""
        return self.max_length.count if self.max_length else 0

    def problems(self, space: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong between the block and the hyperparameters, a line each.

        Args:
            space: The experiment's hyperparameters.
        """
        yield from space_problems(space)

    @abstractmethod
    def outline(self, space: Mapping[str, Any]) -> str:
        """Say in a few words which trials there will be, as in ``8 trials``.

        Args:
            space: The experiment's hyperparameters, without mistakes.
        """

    @abstractmethod
    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make the searcher.

        Args:
            space: The experiment's hyperparameters, without mistakes.
            seed: The same seed gives the same trials.
        """
