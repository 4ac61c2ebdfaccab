"""Operations that a searcher requests."""

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
    """Number of another trial from whose weights it starts: those of the checkpoint of its newest
    known validation, or of the first one after that. Counters, optimizer and schedule are not
    loaded. None for the experiment's own initialization."""


@dataclass(frozen=True)
class Stop:
    """End a trial after a checkpoint."""

    trial_id: int


@dataclass(frozen=True)
class Continue:
    """Let a paused trial train on."""

    trial_id: int
    until: int
    """Length at which it pauses next, in the unit of the search."""


@dataclass(frozen=True)
class Reopen:
    """Undo the end of a stopped trial: it is paused again and may continue."""

    trial_id: int


@dataclass(frozen=True)
class Shutdown:
    """End the search."""


Operation = Create | Stop | Continue | Reopen | Shutdown
