"""What a searcher asks for."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Continue", "Create", "Operation", "Reopen", "Shutdown", "Stop"]


@dataclass(frozen=True)
class Create:
    """Start a trial."""

    trial_id: int
    """Number within the experiment, from 1."""
    hparams: dict[str, Any]
    """Its hyperparameters, nested as in the experiment file."""
    trial_seed: int
    """From 0 to 2**31 - 1."""
    source: int | None = None
    """Number of another trial whose weights it begins with: those of the checkpoint that belongs
    to the newest validation told of it, or of the first one after that. Its counters, optimizer
    and schedule begin anew. None for the experiment's own beginning."""


@dataclass(frozen=True)
class Stop:
    """End a trial after a checkpoint."""

    trial_id: int


@dataclass(frozen=True)
class Continue:
    """Let a trial train on."""

    trial_id: int
    until: int
    """Length at which it pauses again, in the unit of the search."""


@dataclass(frozen=True)
class Reopen:
    """Take back the end of a trial that was stopped: it is paused again, and may go on."""

    trial_id: int


@dataclass(frozen=True)
class Shutdown:
    """The search is over."""


Operation = Create | Stop | Continue | Reopen | Shutdown
