"""Reduce-scatter replaced by all-reduce: ``zero_optimization.reduce_scatter: false``.

It transfers P more elements and gives the same sums, with one more rounding in 16 bits. Use it to
compare with engines that all-reduce, or with a backend whose reduce-scatter is in doubt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from zerotrial.engine.comm.communicator import Work

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Buffer, Communicator


def without_reduce_scatter(comm: Communicator) -> Communicator:
    """Return a communicator that all-reduces instead of reduce-scattering.

    Args:
        comm: Communicator for all other operations.
    """
    return cast("Communicator", _AllReduceCommunicator(comm)) if comm.size > 1 else comm


class _AllReduceCommunicator:
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        """Reduce all of the buffer, which is overwritten, and keep this rank's shard."""
        shard = buffer.tensor.numel() // self._comm.size
        local = buffer.tensor[self._comm.rank * shard : (self._comm.rank + 1) * shard]
        return _ShardOfAllReduce(
            self._comm, self._comm.all_reduce(buffer, factor), local, out, add=add
        )


class _ShardOfAllReduce(Work):
    """All-reduce in progress, of which this rank uses one shard.

    Args:
        comm: Communicator of the all-reduce.
        work: The all-reduce.
        own: (S,) This rank's shard of the reduced buffer.
        out: (S,) Destination; may be the same memory.
        add: Whether to add to ``out``.
    """

    def __init__(
        self, comm: Communicator, work: Work, local: Tensor, out: Tensor, *, add: bool
    ) -> None:
        self._comm = comm
        self._work = work
        self._shard = local
        self._out: Tensor | None = out
        self._add = add

    def advance(self) -> bool:
        if not self._work.advance():
            return False
        self._store_shard()
        return True

    def wait(self) -> None:
        self._work.wait()
        self._store_shard()

    def release(self) -> None:
        """Wait until no other rank reads this rank's buffer."""
        self._work.release()
        self._comm.fence()  # other ranks read the sum from this buffer, too

    def is_free(self) -> bool:
        """Return False: only :meth:`release` frees the buffer."""
        return False

    def _store_shard(self) -> None:
        out, self._out = self._out, None
        if out is None:
            return
        if self._add:
            out.add_(self._shard)
        elif out.data_ptr() != self._shard.data_ptr():
            out.copy_(self._shard)
