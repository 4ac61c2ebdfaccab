"""All-reduce where a stage asks for reduce-scatter: ``zero_optimization.reduce_scatter: false``.

It moves P elements more and gives the same sums; in 16 bits they are rounded once more. It is for
comparing with engines that all-reduce, and for backends whose reduce-scatter is in doubt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Buffer, Communicator, Work


def without_reduce_scatter(comm: Communicator) -> Communicator:
    """Replace a communicator's reduce-scatter, and leave the rest to it.

    Args:
        comm: Does the work.
    """
    return cast("Communicator", _AllReducing(comm)) if comm.size > 1 else comm


class _AllReducing:
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        """Reduce all of the buffer, which is overwritten, and keep this rank's shard."""
        shard = buffer.tensor.numel() // self._comm.size
        own = buffer.tensor[self._comm.rank * shard : (self._comm.rank + 1) * shard]
        return _Kept(self._comm, self._comm.all_reduce(buffer, factor), own, out, add=add)


class _Kept:
    """An all-reduce under way, of which one shard is kept.

    Args:
        comm: That does it.
        work: The all-reduce.
        own: (S,) This rank's shard of what is reduced.
        out: (S,) Takes it, and may be the same memory.
        add: Whether ``out`` is added to.
    """

    def __init__(
        self, comm: Communicator, work: Work, own: Tensor, out: Tensor, *, add: bool
    ) -> None:
        self._comm = comm
        self._work = work
        self._own = own
        self._out: Tensor | None = out
        self._add = add

    def advance(self) -> bool:
        """See :class:`~zerotrial.engine.comm.communicator.Work`."""
        if not self._work.advance():
            return False
        self._take()
        return True

    def wait(self) -> None:
        """See :class:`~zerotrial.engine.comm.communicator.Work`."""
        self._work.wait()
        self._take()

    def release(self) -> None:
        """See :class:`~zerotrial.engine.comm.communicator.Work`. **Collective**."""
        self._work.release()
        self._comm.fence()  # others read the sum from here as well

    def is_free(self) -> bool:
        """See :class:`~zerotrial.engine.comm.communicator.Work`: never without :meth:`release`."""
        return False

    def _take(self) -> None:
        out, self._out = self._out, None
        if out is None:
            return
        if self._add:
            out.add_(self._own)
        elif out.data_ptr() != self._own.data_ptr():
            out.copy_(self._own)
