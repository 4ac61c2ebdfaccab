"""``custom``: a searcher of the user's own, in the model directory or anywhere that reaches REST.

What it decides comes as operations over REST, from the process that runs it
(:mod:`zerolab.client.search`); here is only what was told and how much of it has been answered.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from zerolab.searcher.interface import ExitReason, Searcher
from zerolab.searcher.operations import Operation
from zerolab.searcher.section import SearcherConfig

__all__ = ["CustomConfig", "CustomSearcher"]


class CustomConfig(SearcherConfig):
    """A searcher of your own."""

    name: Literal["custom"]
    """A searcher of your own, in the model directory or anywhere that reaches the REST API."""

    entrypoint: (
        Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")] | None
    ) = None
    """``module:Class`` in the model directory, which the server runs beside itself, in a process of
    its own; null when operations are sent over REST."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Free for the searcher's own use."""

    @property
    def runs_beside(self) -> str | None:
        """The class, where one is named."""
        return self.entrypoint

    def outline(self, space: Mapping[str, Any]) -> str:
        """Nobody knows."""
        del space
        where = f"by {self.entrypoint}" if self.entrypoint else "by operations sent over REST"
        return f"trials chosen {where}"

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """A record of what was answered."""
        del space, seed
        return CustomSearcher()


class CustomSearcher:
    """Decides nothing: remembers what was answered."""

    def __init__(self) -> None:
        self.handled = -1
        self._progress = 0.0

    def initial_operations(self) -> list[Operation]:
        """They are sent later."""
        return []

    def trial_created(self, trial_id: int) -> list[Operation]:
        """Nothing."""
        del trial_id
        return []

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Nothing: what follows is sent."""
        del trial_id, metric, length
        return []

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """Nothing: what follows is sent."""
        del trial_id
        return []

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """Nothing: what follows is sent."""
        del trial_id, reason
        return []

    def operated(self, handled: int, progress: float | None) -> None:
        """Note what was answered."""
        self.handled = max(self.handled, handled)
        if progress is not None:
            self._progress = min(max(progress, 0.0), 1.0)

    def progress(self) -> float:
        """As it was sent."""
        return self._progress
