"""The collectives of the flat stages, behind one small interface.

Three implementations: one process (:class:`SoloCommunicator`), any torch backend
(:class:`GroupCommunicator`), and ranks of one host on CPU
(:class:`~zerotrial.engine.comm.shared_memory.SharedMemoryCommunicator`). :func:`connect` chooses.

Shapes: N ranks, S elements in a shard; a buffer has N * S elements, and rank r owns the r-th S.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Buffer",
    "Common",
    "Communicator",
    "GroupCommunicator",
    "SoloCommunicator",
    "Traffic",
    "Work",
    "uses_nccl",
]


@dataclass
class Traffic:
    """Elements that went through collectives, counted as in the ZeRO paper.

    A reduce-scatter or an all-gather of E elements counts E, an all-reduce 2 E.

    References:
        ZeRO, arXiv:1910.02054, section 7.
    """

    elements: dict[str, int] = field(default_factory=dict)

    def add(self, collective: str, elements: int) -> None:
        """Count one collective."""
        self.elements[collective] = self.elements.get(collective, 0) + elements

    @property
    def total(self) -> int:
        """Elements of all collectives."""
        return sum(self.elements.values())

    def clear(self) -> None:
        """Start counting anew."""
        self.elements.clear()


@dataclass(frozen=True)
class Buffer:
    """Memory on which collectives run."""

    tensor: Tensor
    """(N * S,), this rank's."""

    peers: Sequence[Tensor] = ()
    """Every rank's ``tensor`` in rank order, where they can be read directly; else empty."""

    def part(self, start: int, stop: int) -> "Buffer":
        """Return elements ``start:stop`` as a buffer of their own."""
        return Buffer(self.tensor[start:stop], [peer[start:stop] for peer in self.peers])

    def cast(self, dtype: torch.dtype) -> "Buffer":
        """Read the same bytes as another type."""
        return Buffer(self.tensor.view(dtype), [peer.view(dtype) for peer in self.peers])


class Common:
    """One memory for all ranks: what one writes there, the others read.

    In order only where a fence or another collective lies between.

    Args:
        memory: Mapped by every rank, and zeroed.
        dtype: Of the elements.
    """

    def __init__(self, memory: mmap, dtype: torch.dtype) -> None:
        self._memory = memory
        self._dtype = dtype
        self.parts: list[Tensor] = []
        """All that were asked for."""

    def part(self, start: int, stop: int) -> Tensor:
        """Return elements ``start:stop``, as a storage of their own."""
        count, offset = stop - start, start * self._dtype.itemsize
        if count == 0:
            return torch.empty(0, dtype=self._dtype)
        part = torch.frombuffer(self._memory, dtype=self._dtype, count=count, offset=offset)
        self.parts.append(part)
        return part


class Work(Protocol):
    """A collective under way."""

    def advance(self) -> bool:
        """Do what can be done without waiting; whether the result is there."""
        ...

    def wait(self) -> None:
        """Return when the result is there."""
        ...

    def release(self) -> None:
        """Return when no other rank reads this rank's buffer any more; after :meth:`wait`."""
        ...

    def is_free(self) -> bool:
        """Whether :meth:`wait` and :meth:`release` would return at once."""
        ...


class Communicator(Protocol):
    """Collectives over the data-parallel ranks; every method is **Collective**.

    Every rank calls the same methods, on buffers of the same size, in the same order.
    """

    rank: int
    size: int
    traffic: Traffic

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """Make a zeroed buffer of ``numel`` elements."""
        ...

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Common | None:
        """Make one zeroed memory of ``numel`` elements; None where ranks share no memory."""
        ...

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        """Start: ``out = factor * sum over ranks of their shard of buffer (+ out)``.

        Args:
            buffer: (N * S,); may be overwritten only after :meth:`Work.release` or :meth:`fence`.
            out: (S,); may be this rank's shard of ``buffer.tensor``.
            factor: Applied to the sum.
            add: Whether the old ``out`` is kept and added to.
        """
        ...

    def all_reduce(self, buffer: Buffer, factor: float) -> Work:
        """Start: every rank's ``buffer = factor * sum over ranks``."""
        ...

    def all_gather(self, buffer: Buffer) -> Work:
        """Start: fill the other ranks' shards of ``buffer`` with what they have there."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Add a few fp64 numbers over ranks, in rank order; same bits everywhere. Waits."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank rank 0's tensor, in place. Waits."""
        ...

    def fence(self) -> None:
        """Wait until all ranks are here; buffers of finished collectives are free again."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class _Done:
    """Work that is finished."""

    def advance(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def release(self) -> None:
        return

    def is_free(self) -> bool:
        return True


def _scaled_into(out: Tensor, total: Tensor, factor: float, *, add: bool) -> None:
    """``out = factor * total (+ out)``, where ``out`` may be ``total``."""
    if add:
        out.add_(total, alpha=factor)
        return
    if out.data_ptr() != total.data_ptr():
        out.copy_(total)
    if factor != 1.0:
        out.mul_(factor)


class SoloCommunicator:
    """One rank: nothing to exchange."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """See :class:`Communicator`."""
        return Buffer(torch.zeros(numel, dtype=dtype, device=device))

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Common | None:
        """See :class:`Communicator`."""
        return None

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        """See :class:`Communicator`."""
        _scaled_into(out, buffer.tensor, factor, add=add)
        return _Done()

    def all_reduce(self, buffer: Buffer, factor: float) -> Work:
        """See :class:`Communicator`."""
        _scaled_into(buffer.tensor, buffer.tensor, factor, add=False)
        return _Done()

    def all_gather(self, buffer: Buffer) -> Work:
        """See :class:`Communicator`."""
        return _Done()

    def sum(self, values: Tensor) -> Tensor:
        """See :class:`Communicator`."""
        return values

    def broadcast(self, tensor: Tensor) -> None:
        """See :class:`Communicator`."""

    def fence(self) -> None:
        """See :class:`Communicator`."""

    def close(self) -> None:
        """See :class:`Communicator`."""


class _GroupWork:
    """A collective of torch.distributed, and what is to be done with its result."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], None] | None = None) -> None:
        self._work = work
        self._finish = finish

    def advance(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        finish, self._finish = self._finish, None  # which holds memory
        if finish is not None:
            finish()

    def release(self) -> None:
        # The backend has read it when the work is done; on a GPU, what is written later comes
        # later, since wait() put the stream behind the collective.
        return

    def is_free(self) -> bool:
        return self._work is None


def uses_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if a group's collectives on this device run over NCCL.

    A script may have chosen gloo for its GPUs, for instance because two ranks share one.

    Args:
        group: The ranks.
        device: Where the tensors are.
    """
    if device.type != "cuda":
        return False
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return backends.get("cuda") == "nccl"


class GroupCommunicator:
    """Any backend of torch.distributed: NCCL between GPUs, gloo between hosts.

    NCCL reduces in the buffer's type, asynchronously on its own stream, in place where it can.
    gloo's reduce-scatter is an all-reduce inside, so there the shards travel by all-to-all and are
    summed here, in fp32.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.traffic = Traffic()
        self._group = group
        self._device = device
        self._native = uses_nccl(group, device)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """See :class:`Communicator`."""
        return Buffer(torch.zeros(numel, dtype=dtype, device=device))

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Common | None:
        """See :class:`Communicator`."""
        return None

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        """See :class:`Communicator`."""
        source = buffer.tensor
        self.traffic.add("reduce_scatter", source.numel())
        if self._native:
            operation, factor = self._operation(factor)
            # NCCL may write to the shard that it reads
            total = source.new_empty(out.numel()) if add or out.dtype != source.dtype else out
            work = _reduce_scatter(total, source, self._group, operation)
            return _GroupWork(work, lambda: _scaled_into(out, total, factor, add=add))
        parts = torch.empty_like(source)
        work = dist.all_to_all_single(parts, source, group=self._group, async_op=True)

        def add_up() -> None:
            # fp32, or fp64 where the gradient is; in rank order
            wide = torch.promote_types(source.dtype, torch.float32)
            rows = parts.view(self.size, -1)
            total = rows[0].to(wide, copy=True)
            for row in rows[1:]:
                total.add_(row)
            _scaled_into(out, total, factor, add=add)

        return _GroupWork(work, add_up)

    def all_reduce(self, buffer: Buffer, factor: float) -> Work:
        """See :class:`Communicator`."""
        self.traffic.add("all_reduce", 2 * buffer.tensor.numel())
        operation, factor = self._operation(factor)
        work = dist.all_reduce(buffer.tensor, operation, group=self._group, async_op=True)
        tensor = buffer.tensor
        return _GroupWork(work, lambda: _scaled_into(tensor, tensor, factor, add=False))

    def all_gather(self, buffer: Buffer) -> Work:
        """See :class:`Communicator`."""
        self.traffic.add("all_gather", buffer.tensor.numel())
        shard = buffer.tensor.numel() // self.size
        own = buffer.tensor[self.rank * shard : (self.rank + 1) * shard]
        if not self._native:  # gloo copies the input into the output: they must not be the same
            own = own.clone()
        return _GroupWork(_all_gather(buffer.tensor, own, self._group))

    def sum(self, values: Tensor) -> Tensor:
        """See :class:`Communicator`."""
        gathered = values.new_empty(self.size * values.numel())
        work = _all_gather(gathered, values.contiguous(), self._group)
        if work is not None:
            work.wait()
        return gathered.view(self.size, -1).sum(0)

    def broadcast(self, tensor: Tensor) -> None:
        """See :class:`Communicator`."""
        dist.broadcast(tensor, group=self._group, group_src=0)

    def fence(self) -> None:
        """See :class:`Communicator`."""
        if not self._native:  # on one stream, order is enough
            dist.barrier(self._group)

    def close(self) -> None:
        """See :class:`Communicator`."""

    def _operation(self, factor: float) -> tuple["dist.ReduceOp.RedOpType", float]:
        """What to do with the ranks' values, and the factor that is left for afterwards.

        NCCL takes the mean without another pass over the memory.
        """
        if self._native and factor * self.size == 1.0:
            return dist.ReduceOp.AVG, 1.0
        return dist.ReduceOp.SUM, factor


def _reduce_scatter(
    output: Tensor,
    source: Tensor,
    group: dist.ProcessGroup,
    operation: "dist.ReduceOp.RedOpType",
) -> dist.Work | None:
    """``reduce_scatter_tensor``, under the name that this torch does not warn about."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = call(output, source, operation, group=group, async_op=True)
    return work


def _all_gather(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """``all_gather_into_tensor``, under the name that this torch does not warn about."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(output, source, group=group, async_op=True)
    return work
