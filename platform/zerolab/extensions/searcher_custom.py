"""``custom``: a user's searcher, in the model directory or behind the REST API.

Its decisions arrive as operations over REST, from the process that runs it
(:mod:`zerolab.extensions.search_client`). This module only stores which events have been answered.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from zerolab.searcher.interface import ExitReason, Searcher
from zerolab.searcher.operations import Operation
from zerolab.searcher.section import SearcherConfig

__all__ = ["CustomConfig", "CustomSearcher"]


class CustomConfig(SearcherConfig):
    """A searcher that you write."""

    name: Literal["custom"]
    """A searcher that you write, in the model directory or in any process that reaches the REST
    API."""

    entrypoint: (
        Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")] | None
    ) = None
    """``module:Class`` in the model directory, which the server runs in a separate process; null
    when operations are sent over REST."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options for the searcher; not interpreted."""

    @property
    def external_entrypoint(self) -> str | None:
        """Entrypoint of the searcher's process, if one is configured."""
        return self.entrypoint

    def outline(self, space: Mapping[str, Any]) -> str:
        """Describe who chooses the trials."""
        del space
        source = f"by {self.entrypoint}" if self.entrypoint else "by operations sent over REST"
        return f"trials chosen {source}"

    def make(self, space: Mapping[str, Any], seed: int) -> Searcher:
        """Make a record of the answered events."""
        del space, seed
        return CustomSearcher()


class CustomSearcher:
    """Record of the events that an external searcher has answered."""

    def __init__(self) -> None:
        self.handled = -1
        self._progress = 0.0

    def initial_operations(self) -> list[Operation]:
        """Return nothing: operations arrive over REST."""
        return []

    def trial_created(self, trial_id: int) -> list[Operation]:
        """Return nothing: operations arrive over REST."""
        del trial_id
        return []

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        """Return nothing: operations arrive over REST."""
        del trial_id, metric, length
        return []

    def trial_exited(self, trial_id: int) -> list[Operation]:
        """Return nothing: operations arrive over REST."""
        del trial_id
        return []

    def trial_exited_early(self, trial_id: int, reason: ExitReason | str) -> list[Operation]:
        """Return nothing: operations arrive over REST."""
        del trial_id, reason
        return []

    def record_operations(self, handled: int, progress: float | None) -> None:
        """Record the last answered event and the progress."""
        self.handled = max(self.handled, handled)
        if progress is not None:
            self._progress = min(max(progress, 0.0), 1.0)

    def progress(self) -> float:
        """Return the progress that the external searcher sent last."""
        return self._progress
