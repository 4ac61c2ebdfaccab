"""Operations that a searcher requests."""

from typing import Any

import msgspec

__all__ = ["Continue", "Create", "Operation", "Reopen", "Shutdown", "Stop"]


class Create(msgspec.Struct, frozen=True):
    """Operation that starts a new trial.

    Args:
        trial_id: Number within the experiment, from 1.
        hparams: Hyperparameters, nested as in the experiment file.
        trial_seed: From 0 to 2**31 - 1.
        source: Number of another trial from whose weights it starts; None for a fresh start.

    Example:
        >>> from zerolab.searcher import Create
        >>> Create(trial_id=1, hparams={"lr": 0.1}, trial_seed=7).source is None
        True
    """

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
    """Operation that ends a trial after a checkpoint.

    Args:
        trial_id: Number within the experiment.

    Example:
        >>> from zerolab.searcher import Stop
        >>> Stop(1)
        Stop(trial_id=1)
    """

    trial_id: int


class Continue(msgspec.Struct, frozen=True):
    """Operation that lets a paused trial train further.

    Args:
        trial_id: Number within the experiment.
        until: Length at which it pauses next, in the unit of the search.

    Example:
        >>> from zerolab.searcher import Continue
        >>> Continue(1, until=400)
        Continue(trial_id=1, until=400)
    """

    trial_id: int
    until: int
    """Length at which it pauses next, in the unit of the search."""


class Reopen(msgspec.Struct, frozen=True):
    """Operation that undoes the end of a stopped trial.

    The trial is paused again and may continue.

    Args:
        trial_id: Number within the experiment.

    Example:
        >>> from zerolab.searcher import Reopen
        >>> Reopen(1)
        Reopen(trial_id=1)
    """

    trial_id: int


class Shutdown(msgspec.Struct, frozen=True):
    """Operation that ends the search.

    Example:
        >>> from zerolab.searcher import Shutdown
        >>> Shutdown()
        Shutdown()
    """


Operation = Create | Stop | Continue | Reopen | Shutdown
