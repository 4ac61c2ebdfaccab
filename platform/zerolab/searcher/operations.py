"""Operations that a searcher requests."""

from typing import Any

import msgspec

__all__ = ["Continue", "Create", "Operation", "Reopen", "Shutdown", "Stop"]


class Create(msgspec.Struct, frozen=True):
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


class Stop(msgspec.Struct, frozen=True):
    """End a trial after a checkpoint."""

    trial_id: int


class Continue(msgspec.Struct, frozen=True):
    """Let a paused trial train on."""

    trial_id: int
    until: int
    """Length at which it pauses next, in the unit of the search."""


class Reopen(msgspec.Struct, frozen=True):
    """Undo the end of a stopped trial: it is paused again and may continue."""

    trial_id: int


class Shutdown(msgspec.Struct, frozen=True):
    """End the search."""


Operation = Create | Stop | Continue | Reopen | Shutdown
