"""Operations that a searcher requests."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec

__all__ = [
    "ComputedOperation", "Continue", "Create", "Deferred", "Operation", "Reopen", "Shutdown",
    "Stop", "compute_deferred",
]  # fmt: skip


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


class Deferred:
    """Operations that take more than some milliseconds to compute.

    The server computes them outside of its transactions, in the order in which the searcher
    returned them, while the searcher may receive further events. The operations must follow from
    the events before this one only, because a replay computes them at once.

    Args:
        compute: Returns the operations; called once.

    Example:
        >>> from zerolab.searcher import Deferred, Stop
        >>> Deferred(lambda: [Stop(1)]).operations
        [Stop(trial_id=1)]
    """

    def __init__(self, compute: "Callable[[], Sequence[Operation]]") -> None:
        self._compute = compute

    @cached_property
    def operations(self) -> "Sequence[Operation]":
        """The operations, computed by the first use."""
        return self._compute()


ComputedOperation = Create | Stop | Continue | Reopen | Shutdown
Operation = ComputedOperation | Deferred


def compute_deferred(operations: Iterable[Operation]) -> list[ComputedOperation]:
    """Replace deferred operations by those that they compute.

    Args:
        operations: Operations of a searcher.

    Returns:
        The operations in order, without deferred ones.

    Example:
        >>> from zerolab.searcher import Deferred, Stop, compute_deferred
        >>> compute_deferred([Stop(1), Deferred(lambda: [Stop(2)])])
        [Stop(trial_id=1), Stop(trial_id=2)]
    """
    computed: list[ComputedOperation] = []
    for operation in operations:
        if isinstance(operation, Deferred):
            computed += compute_deferred(operation.operations)
        else:
            computed.append(operation)
    return computed
