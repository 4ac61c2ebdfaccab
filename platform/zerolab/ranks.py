"""Exchange of small values between the ranks of a run, and shared failure.

The transport differs: sockets without torch
(:class:`zerolab.core.socket_ranks.SocketRanks`), a process group of ``torch.distributed`` in trials
and engines. This module has the common part.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from zerolab.errors import (
    InvalidHyperparametersError,
    PeerFailedError,
    StaleRunError,
    StorageError,
    ZerolabError,
    is_storage_failure,
)
from zerolab.replacements import NamesReplacements

__all__ = ["OneRank", "RankLocation", "Ranks"]

T = TypeVar("T")

_SHARED: tuple[type[ZerolabError], ...] = (
    StaleRunError,
    InvalidHyperparametersError,
    StorageError,
    ZerolabError,
)
"""Errors with the same meaning on all ranks, by precedence; any other one is a peer's failure."""


class Ranks(ABC):
    """Communicating processes, as seen from one of them.

    A collective must be called by every rank, in the same order, from one thread.
    """

    rank: int
    """Rank of this process; 0 is the chief."""
    size: int
    """Number of processes."""
    local_rank: int
    """Rank of this process on its machine."""
    local_size: int
    """Number of processes on this machine."""

    @property
    def is_chief(self) -> bool:
        """Return whether this is rank 0, which reports to the server."""
        return self.rank == 0

    @abstractmethod
    def allgather(self, value: Any, operation: str = "allgather") -> list[Any]:
        """Return the values of all ranks. **Collective**.

        Args:
            value: Value of this rank.
            operation: Name of the exchange, for errors.

        Returns:
            The values in the order of ranks.

        Example:
            >>> from zerolab.core.socket_ranks import SocketRanks
            >>> SocketRanks().allgather(0.5)
            [0.5]
        """

    @abstractmethod
    def broadcast(self, value: T, operation: str = "broadcast") -> T:
        """Return the chief's value on every rank. **Collective**.

        Args:
            value: Value of the chief; ignored on other ranks.
            operation: Name of the exchange, for errors.

        Returns:
            The chief's value.

        Example:
            >>> from zerolab.core.socket_ranks import SocketRanks
            >>> SocketRanks().broadcast("run-7")
            'run-7'
        """

    def barrier(self, operation: str = "barrier") -> None:
        """Wait until every rank has called this. **Collective**.

        Args:
            operation: Name of the exchange, for errors.

        Example:
            >>> with zerolab.core.init() as context:
            ...     context.distributed.barrier()
        """
        self.allgather(None, operation)

    @contextmanager
    def together(self, what: str = "") -> Iterator[None]:
        """Fail on every rank if the block fails on any. **Collective**.

        The ranks communicate at the end of the block. The block must not contain a collective,
        which a failed rank would miss.

        Args:
            what: Consequence of a failure, e.g. ``checkpoint: not stored``.

        Yields:
            Nothing.

        Raises:
            StaleRunError: On every rank, if another run has taken over.
            InvalidHyperparametersError: On every rank, if one declared them invalid.
            StorageError: On every rank, if the storage failed one.
            ZerolabError: On every rank, for another error that the user can fix.
            PeerFailedError: On ranks whose block succeeded, for any other failure.

        Example:
            >>> with zerolab.core.init() as context:
            ...     with context.distributed.together("the data is not downloaded"):
            ...         if context.distributed.is_chief:
            ...             data = [1, 2, 3]  # download
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:  # noqa: BLE001 - raised below, once all ranks know
            error = caught
        failures = self.allgather(
            None if error is None else _failure_summary(error), what or "together"
        )
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind, text = failure
                cause = f", because of rank {rank}: {text}" if what else f"rank {rank}: {text}"
                raise self._for_peers(_SHARED[kind] if kind >= 0 else None, what + cause)

    def _for_peers(self, kind: type[ZerolabError] | None, text: str) -> Exception:
        """Return the exception for ranks that did not fail themselves.

        Args:
            kind: Class of the error; None if it is not one of Zerolab's.
            text: Message of the failed rank.
        """
        return PeerFailedError(text) if kind is None else kind(text)


class RankLocation(NamesReplacements):
    """Position of a rank among the machines of a run."""

    rank: int
    size: int
    local_rank: int
    """Rank of this process on its machine."""
    local_size: int
    """Number of processes on this machine."""

    def get_rank(self) -> int:
        """Return the rank of this process, over all machines.

        Returns:
            From 0 to the number of processes - 1; 0 is the chief.

        Example:
            >>> zerotrial.Distributed().get_rank()
            0
        """
        return self.rank

    def get_size(self) -> int:
        """Return the number of processes over all machines.

        Returns:
            At least 1.

        Example:
            >>> zerotrial.Distributed().get_size()
            1
        """
        return self.size

    def get_local_rank(self) -> int:
        """Return the rank of this process on its machine.

        Returns:
            From 0 to the number of processes on the machine - 1.

        Example:
            >>> zerotrial.Distributed().get_local_rank()
            0
        """
        return self.local_rank

    def get_local_size(self) -> int:
        """Return the number of processes on this machine.

        Returns:
            At least 1.

        Example:
            >>> zerotrial.Distributed().get_local_size()
            1
        """
        return self.local_size

    def get_num_agents(self) -> int:
        """Return the number of machines of the run.

        Each machine has as many processes as this one.

        Returns:
            At least 1.

        Example:
            >>> zerotrial.Distributed().get_num_agents()
            1
        """
        return self.size // self.local_size


class OneRank(Ranks):
    """A single process."""

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


def _failure_summary(error: BaseException) -> tuple[int, str]:
    text = str(error)
    message = (
        text if isinstance(error, ZerolabError) and text else f"{type(error).__name__}: {text}"
    )
    if is_storage_failure(error):
        return _SHARED.index(StorageError), message
    for number, kind in enumerate(_SHARED):
        if isinstance(error, kind):
            return number, message
    return -1, message
