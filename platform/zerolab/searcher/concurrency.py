"""What searchers have in common that keep so many trials training."""

from abc import ABC, abstractmethod

from zerolab.searcher.operations import Operation

__all__ = ["FillingSearcher"]


class FillingSearcher(ABC):
    """Asks for trials whenever there is room: at the beginning, and when one ends or pauses."""

    def initial_operations(self) -> list[Operation]:
        """The first trials."""
        return self._fill()

    def trial_created(self, trial_id: int) -> list[Operation]:
        """Nothing follows from it: the trial was counted when it was asked for."""
        del trial_id
        return []

    @abstractmethod
    def _fill(self) -> list[Operation]:
        """What is wanted now, up to as many trials as may train at a time."""
