"""Small values between the ranks of a run, and failing on all of them or on none.

What carries the values differs: sockets where there is no torch
(:class:`zerolab.core.socket_ranks.SocketRanks`), a process group of ``torch.distributed`` in trials
and engines. What is built on it stands here once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from zerolab.determined import NamesReplacements
from zerolab.errors import (
    InvalidHyperparametersError,
    PeerFailedError,
    StaleRunError,
    StorageError,
    ZerolabError,
    is_storage_failure,
)

__all__ = ["Located", "OneRank", "Ranks"]

T = TypeVar("T")

_SHARED: tuple[type[ZerolabError], ...] = (
    StaleRunError,
    InvalidHyperparametersError,
    StorageError,
    ZerolabError,
)
"""What a failure means for all ranks, the first that fits; anything else is a peer's failure."""


class Ranks(ABC):
    """Some processes that work together, as seen from one of them.

    A collective must be called by every rank, in the same order, from one thread.
    """

    rank: int
    """Of this process; 0 is the chief."""
    size: int
    """Number of processes."""
    local_rank: int
    """Of this process among those of its machine."""
    local_size: int
    """Processes on this machine."""

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which talks to the server."""
        return self.rank == 0

    @abstractmethod
    def allgather(self, value: Any, operation: str = "allgather") -> list[Any]:
        """Give every rank the values of all ranks, in the order of ranks. **Collective**."""

    @abstractmethod
    def broadcast(self, value: T, operation: str = "broadcast") -> T:
        """Give every rank the chief's value. **Collective**."""

    def barrier(self, operation: str = "barrier") -> None:
        """Wait until every rank is here. **Collective**."""
        self.allgather(None, operation)

    @contextmanager
    def together(self, what: str = "") -> Iterator[None]:
        """Fail on every rank if the block fails on any. **Collective** at the end of the block.

        The block itself must hold no collective that a rank which fails would miss.

        Args:
            what: What then has not happened, e.g. ``checkpoint: not stored``.

        Raises:
            StaleRunError: On every rank, if one has found that another run has taken over.
            InvalidHyperparametersError: On every rank, if one has declared them impossible.
            StorageError: On every rank, if the storage failed one.
            ZerolabError: On every rank, for another mistake that the user can mend.
            PeerFailedError: On ranks whose own block was fine, for any other failure.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:  # noqa: BLE001 - raised below, once all ranks know
            error = caught
        told = self.allgather(None if error is None else _told(error), what or "together")
        if error is not None:
            raise error
        for rank, failure in enumerate(told):
            if failure is not None:
                kind, text = failure
                cause = f", because of rank {rank}: {text}" if what else f"rank {rank}: {text}"
                raise self._for_peers(_SHARED[kind] if kind >= 0 else None, what + cause)

    def _for_peers(self, kind: type[ZerolabError] | None, text: str) -> Exception:
        """Make what ranks raise that did not fail themselves.

        Args:
            kind: What the failure means for all ranks; None when it is no error of ours.
            text: What the rank said that failed.
        """
        return PeerFailedError(text) if kind is None else kind(text)


class Located(NamesReplacements):
    """Place of a rank among the machines of a run."""

    rank: int
    size: int
    local_rank: int
    """Of this process among those of its machine."""
    local_size: int
    """Processes on this machine."""

    def get_rank(self) -> int:
        """Of this process, over all machines."""
        return self.rank

    def get_size(self) -> int:
        """Number of processes."""
        return self.size

    def get_local_rank(self) -> int:
        """Of this process among those of its machine."""
        return self.local_rank

    def get_local_size(self) -> int:
        """Processes on this machine."""
        return self.local_size

    def get_num_agents(self) -> int:
        """Machines, each with as many processes as this one."""
        return self.size // self.local_size


class OneRank(Ranks):
    """A process that works alone."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def allgather(self, value: Any, operation: str = "allgather") -> list[Any]:
        """Return this rank's value."""
        return [value]

    def broadcast(self, value: T, operation: str = "broadcast") -> T:
        """Return the value."""
        return value


def _told(error: BaseException) -> tuple[int, str]:
    text = str(error)
    said = text if isinstance(error, ZerolabError) and text else f"{type(error).__name__}: {text}"
    if is_storage_failure(error):
        return _SHARED.index(StorageError), said
    for number, kind in enumerate(_SHARED):
        if isinstance(error, kind):
            return number, said
    return -1, said
