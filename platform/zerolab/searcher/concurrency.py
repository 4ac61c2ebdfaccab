"""Base class of searchers that keep a number of trials training."""

from abc import ABC, abstractmethod

from zerolab.searcher.operations import Operation

__all__ = ["ConcurrentSearcher"]


class ConcurrentSearcher(ABC):
    """Searcher that keeps a number of trials training; starts one when another ends or pauses."""

    def initial_operations(self) -> list[Operation]:
        """Return the operations that create the first trials."""
        return self._fill()

    def trial_created(self, trial_id: int) -> list[Operation]:
        """Return no operations: the trial was counted when it was requested."""
        del trial_id
        return []

    @abstractmethod
    def _fill(self) -> list[Operation]:
        """Return operations until the maximum number of trials trains."""
