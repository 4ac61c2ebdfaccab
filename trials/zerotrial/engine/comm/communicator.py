"""Collectives of the flat stages behind one small interface.

Three implementations: one process (:class:`SoloCommunicator`), any torch backend
(:class:`GroupCommunicator`), and CPU ranks of one host
(:class:`~zerotrial.extensions.shared_memory.collectives.SharedMemoryCommunicator`).
:func:`~zerotrial.engine.comm.factory.connect` selects one.

Shapes: N ranks, S elements in a shard; a buffer has N * S elements, and rank r owns the r-th shard.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from mmap import mmap

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Buffer",
    "Communicator",
    "GroupCommunicator",
    "PeerError",
    "Ring",
    "SharedBuffer",
    "SoloCommunicator",
    "Traffic",
    "Work",
    "uses_nccl",
]


class PeerError(RuntimeError):
    """Error of another rank: it died, stopped answering, or called a different collective."""


@dataclass
class Traffic:
    """Number of elements transferred by collectives, counted as in the ZeRO paper.

    A reduce-scatter or an all-gather of E elements counts E, an all-reduce 2 E.

    References:
        ZeRO, arXiv:1910.02054, section 7.
    """

    elements: dict[str, int] = field(default_factory=dict)

    def add(self, collective: str, elements: int) -> None:
        """Count one collective of ``elements`` elements."""
        self.elements[collective] = self.elements.get(collective, 0) + elements

    @property
    def total(self) -> int:
        """Number of elements of all collectives."""
        return sum(self.elements.values())

    def clear(self) -> None:
        """Reset all counts to zero."""
        self.elements.clear()


@dataclass(frozen=True)
class Buffer:
    """Memory that collectives operate on."""

    tensor: Tensor
    """(N * S,) This rank's memory."""

    peers: Sequence[Tensor] = ()
    """Every rank's ``tensor`` in rank order if directly readable; otherwise empty."""

    def part(self, start: int, stop: int) -> "Buffer":
        """Return elements ``start:stop`` as a buffer."""
        return Buffer(self.tensor[start:stop], [peer[start:stop] for peer in self.peers])

    def cast(self, dtype: torch.dtype) -> "Buffer":
        """View the same bytes as another type."""
        return Buffer(self.tensor.view(dtype), [peer.view(dtype) for peer in self.peers])


class SharedBuffer:
    """One memory shared by all ranks: writes of one rank are visible to the others.

    Writes are ordered only across a fence or another collective.

    Args:
        memory: Zeroed memory, mapped by every rank.
        dtype: Type of the elements.
    """

    def __init__(self, memory: mmap, dtype: torch.dtype) -> None:
        self._memory = memory
        self._dtype = dtype
        self.parts: list[Tensor] = []
        """All parts returned so far."""

    def part(self, start: int, stop: int) -> Tensor:
        """Return elements ``start:stop`` as a tensor with its own storage object."""
        count, offset = stop - start, start * self._dtype.itemsize
        if count == 0:
            return torch.empty(0, dtype=self._dtype)
        part = torch.frombuffer(self._memory, dtype=self._dtype, count=count, offset=offset)
        self.parts.append(part)
        return part


class Work:
    """Collective in progress. This one is finished."""

    def advance(self) -> bool:
        """Make progress without waiting; return whether the result is complete."""
        return True

    def wait(self) -> None:
        """Wait for the result."""

    def release(self) -> None:
        """Wait until no other rank reads this rank's buffer; call it after :meth:`wait`."""

    def is_free(self) -> bool:
        """Return whether :meth:`wait` and :meth:`release` would return at once."""
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


class Communicator:
    """Collectives over the data-parallel ranks, here of a single one.

    Every method is **Collective**: every rank calls the same methods, on buffers of the same size,
    in the same order.
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """Allocate a zeroed buffer of ``numel`` elements."""
        return Buffer(torch.zeros(numel, dtype=dtype, device=device))

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        """Start: ``out = factor * sum over ranks of their shard of buffer (+ out)``.

        Args:
            buffer: (N * S,) Input; may be overwritten only after :meth:`Work.release` or
                :meth:`fence`.
            out: (S,) Output; may be this rank's shard of ``buffer.tensor``.
            factor: Factor of the sum.
            add: Whether to add to the old ``out``.
        """
        _scaled_into(out, buffer.tensor, factor, add=add)
        return Work()

    def all_reduce(self, buffer: Buffer, factor: float) -> Work:
        """Start: every rank's ``buffer = factor * sum over ranks``."""
        _scaled_into(buffer.tensor, buffer.tensor, factor, add=False)
        return Work()

    def all_gather(self, buffer: Buffer) -> Work:
        """Start: fill the other ranks' shards of ``buffer`` with their values."""
        return Work()

    def sum(self, values: Tensor) -> Tensor:
        """Add a few fp64 numbers over ranks, in rank order; bitwise equal everywhere. Waits."""
        return values

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor to every rank, in place. Waits."""

    def fence(self) -> None:
        """Wait for all ranks; buffers of finished collectives may be reused afterwards."""

    def close(self) -> None:
        """Release all resources."""


class SoloCommunicator(Communicator):
    """Communicator of a single rank, without communication."""


class _GroupWork(Work):
    """Collective of torch.distributed with a callback for its result.

    The backend has read the buffer when the work is done. On a GPU, later writes are queued behind
    the collective, since ``wait()`` made the stream wait for it. So nothing must be released.
    """

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
        finish, self._finish = self._finish, None  # drop the closure, which holds memory
        if finish is not None:
            finish()

    def is_free(self) -> bool:
        return self._work is None


def uses_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a group's collectives on this device run over NCCL.

    Scripts may select gloo for GPUs, for instance because two ranks share one.
    """
    if device.type != "cuda":
        return False
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return backends.get("cuda") == "nccl"


class GroupCommunicator(Communicator):
    """Communicator of any torch.distributed backend: NCCL between GPUs, gloo between hosts.

    NCCL reduces in the buffer's type, asynchronously on its own stream, in place where possible.
    gloo implements reduce-scatter as an all-reduce. Therefore its shards are exchanged by
    all-to-all and summed here in fp32.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._device = device
        self._native = uses_nccl(group, device)

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        """Start: ``out = factor * sum over ranks of their shard of buffer (+ out)``."""
        source = buffer.tensor
        self.traffic.add("reduce_scatter", source.numel())
        if self._native:
            operation, factor = self._operation(factor)
            # NCCL may write to the shard that it is reading
            total = source.new_empty(out.numel()) if add or out.dtype != source.dtype else out
            work = _reduce_scatter(total, source, self._group, operation)
            return _GroupWork(work, lambda: _scaled_into(out, total, factor, add=add))
        parts = torch.empty_like(source)
        work = dist.all_to_all_single(parts, source, group=self._group, async_op=True)

        def add_up() -> None:
            # fp32, or fp64 for fp64 gradients; in rank order, so that all runs sum alike
            wide = torch.promote_types(source.dtype, torch.float32)
            rows = parts.view(self.size, -1)
            total = rows[0].to(wide, copy=True)
            for row in rows[1:]:
                total.add_(row)
            _scaled_into(out, total, factor, add=add)

        return _GroupWork(work, add_up)

    def all_reduce(self, buffer: Buffer, factor: float) -> Work:
        """Start: every rank's ``buffer = factor * sum over ranks``."""
        self.traffic.add("all_reduce", 2 * buffer.tensor.numel())
        operation, factor = self._operation(factor)
        work = dist.all_reduce(buffer.tensor, operation, group=self._group, async_op=True)
        tensor = buffer.tensor
        return _GroupWork(work, lambda: _scaled_into(tensor, tensor, factor, add=False))

    def all_gather(self, buffer: Buffer) -> Work:
        """Start: fill the other ranks' shards of ``buffer`` with their values."""
        self.traffic.add("all_gather", buffer.tensor.numel())
        shard = buffer.tensor.numel() // self.size
        local_shard = buffer.tensor[self.rank * shard : (self.rank + 1) * shard]
        if not self._native:  # gloo copies input to output, so they must not overlap
            local_shard = local_shard.clone()
        return _GroupWork(_all_gather(buffer.tensor, local_shard, self._group))

    def sum(self, values: Tensor) -> Tensor:
        """Add a few fp64 numbers over ranks, in rank order; bitwise equal everywhere. Waits."""
        gathered = values.new_empty(self.size * values.numel())
        work = _all_gather(gathered, values.contiguous(), self._group)
        if work is not None:
            work.wait()
        return gathered.view(self.size, -1).sum(0)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor to every rank, in place. Waits."""
        dist.broadcast(tensor, group=self._group, group_src=0)

    def fence(self) -> None:
        """Wait for all ranks; buffers of finished collectives may be reused afterwards."""
        if not self._native:  # NCCL's stream order already suffices
            dist.barrier(self._group)

    def _operation(self, factor: float) -> tuple["dist.ReduceOp.RedOpType", float]:
        """Return the reduce operation, and the factor to apply to its result.

        NCCL averages without another pass over the memory.
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
    """Call ``reduce_scatter_tensor`` under the name that is not deprecated."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = call(output, source, operation, group=group, async_op=True)
    return work


def _all_gather(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Call ``all_gather_into_tensor`` under the name that is not deprecated."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(output, source, group=group, async_op=True)
    return work


class Ring:
    """Buffers of bytes in a ring; the *turn* is the index of the next collective's buffer.

    Args:
        comm: Allocator; every rank must request the same sizes in the same order.
        device: Device of the buffers.
        count: Number of buffers.
        works: Collectives in progress, oldest first, in the same order on every rank. The
            caller appends to it.
        nbytes: Size of each buffer; 0 allocates on first use and again for larger requests.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        count: int,
        works: deque[Work],
        nbytes: int = 0,
    ) -> None:
        self._comm = comm
        self._device = device
        self._count = count
        self._works = works
        preallocated = range(count if nbytes else 0)
        self._buffers = [comm.allocate(nbytes, torch.uint8, device) for _ in preallocated]
        self._users: list[Work | None] = [None] * count
        self._turn = 0

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's buffers."""
        return [buffer.tensor for buffer in self._buffers]

    def is_free(self, ahead: int) -> bool:
        """Return whether the buffer ``ahead`` turns from now can be written at once."""
        if ahead >= self._count:
            return False
        user = self._users[(self._turn + ahead) % self._count]
        return user is None or user.is_free()

    def wait(self) -> None:
        """Wait until the buffer of the current turn can be written."""
        # Peers read the buffer in place. Writing to it before `release` would change a gradient
        # that a slower rank is still adding up, without any error.
        user, self._users[self._turn] = self._users[self._turn], None
        if user is None:
            return
        # Ranks finish collectives in the same order, or each would wait for another one's.
        while self._works and not user.advance():
            self._works.popleft().wait()
        user.release()

    def get(self, numel: int, dtype: torch.dtype, ahead: int = 0) -> Buffer:
        """Return a free buffer. **Collective** if it must be allocated.

        Args:
            numel: Number of elements, N * S.
            dtype: Type of the elements.
            ahead: Number of turns from now.

        Returns:
            The buffer's first elements, uninitialized.
        """
        nbytes = numel * dtype.itemsize
        turn = (self._turn + ahead) % self._count
        if turn == len(self._buffers):
            self._buffers.append(self._comm.allocate(nbytes, torch.uint8, self._device))
        elif self._buffers[turn].tensor.numel() < nbytes:
            self._buffers[turn] = self._comm.allocate(nbytes, torch.uint8, self._device)
        return self._buffers[turn].part(0, nbytes).cast(dtype)

    def advance_turn(self, work: Work) -> None:
        """End the current turn; ``work`` reads its buffer."""
        self._users[self._turn] = work
        self._turn = (self._turn + 1) % self._count
