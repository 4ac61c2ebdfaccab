"""Stage 3's collectives on CPU, in place of those that ``fully_shard`` comes with.

As shipped it calls gloo, whose reduce-scatter is an all-reduce inside and whose data pass through
sockets. Here ranks of one host share memory; on different hosts they use the engine's own
all-to-all.

N ranks, S elements of a unit on each: what is gathered or reduced has N * S elements, and rank r's
part is the r-th S, exactly as in a :class:`~zerotrial.engine.comm.Buffer`.

**Gathering** waits for nobody: weights change only when the optimizer steps. After it each rank
publishes its shards, in the type that forward computes in, and all meet once; from then on a gather
copies what the others have published. When a rank publishes again, the norm of the gradient has
been summed in between, so that no other rank is still in a forward or backward that reads. User
code may write to weights as well (to clip them, say): the ranks ask each other once for each
forward of the model, and publish again if any shard is not what it was.

**Reducing** goes through buffers in turn. One may be filled again when no rank reads it any more;
every rank finishes one collective before it begins the next, so that three are more than enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from zerotrial.engine.comm import Buffer, Communicator

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.parts import Observer

_RING = 3


class BufferRing:
    """Buffers handed out in turn, so that none is filled while another rank still reads it.

    Args:
        comm: Allocates them; every rank must ask for the same sizes in the same order.
        device: Of the buffers.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._slots: list[Buffer] = []  # as bytes
        self._next = 0

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's memory."""
        return [slot.tensor for slot in self._slots]

    def lend(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Lend a buffer until it is this one's turn again. **Collective**.

        Args:
            numel: Elements, N * S.
            dtype: Of the elements.

        Returns:
            A buffer with arbitrary content.
        """
        nbytes = numel * dtype.itemsize
        index = self._next
        self._next = (index + 1) % _RING
        if index == len(self._slots):
            self._slots.append(self._comm.allocate(nbytes, torch.uint8, self._device))
        elif self._slots[index].tensor.numel() < nbytes:
            self._slots[index] = self._comm.allocate(nbytes, torch.uint8, self._device)
        return self._slots[index].part(0, nbytes).cast(dtype)


class PublishedShards:
    """One unit's shards as the other ranks read them.

    Args:
        owner: The unit's parameter group inside ``fully_shard``.
        comm: Between the ranks.
        device: Of the shards.
    """

    def __init__(self, owner: Any, comm: Communicator, device: torch.device) -> None:
        self._shards: list[Tensor] = [p._sharded_param_data for p in owner.fsdp_params]  # noqa: SLF001 - no public way
        sizes = [shard.numel() for shard in self._shards]
        kinds = {p.param_dtype or p.orig_dtype for p in owner.fsdp_params}
        self.buffer: Buffer | None = None
        self._homes: list[Tensor] = []
        if len(kinds) == 1:
            self.buffer = comm.allocate(sum(sizes), kinds.pop(), device)
            self._homes = list(torch.split(self.buffer.tensor, sizes))

    def is_current(self) -> bool:
        """Whether the shards are still what was published."""
        pairs = zip(self._homes, self._shards, strict=bool(self._homes))
        return all(torch.equal(home, shard.to(home.dtype)) for home, shard in pairs)

    def write(self) -> None:
        """Put the shards where the others read them; nobody may be reading."""
        if self._homes:
            torch._foreach_copy_(self._homes, self._shards)


class SharedAllGather(AllGather):
    """Gathers a unit's parameters; see ``FSDPModule.set_custom_all_gather``.

    Args:
        comm: Between the ranks.
        published: The unit's shards.
    """

    def __init__(self, comm: Communicator, published: PublishedShards) -> None:
        self._comm = comm
        self._published = published

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Make the memory into which a unit is gathered."""
        return torch.empty(math.prod(int(length) for length in size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> None:
        """Fill the other ranks' parts. **Collective** only where ranks share no memory."""
        source = self._published.buffer
        rows = output_tensor.view(self._comm.size, -1)
        if source is None or not source.peers:
            self._gather_through_group(output_tensor, input_tensor, group)
            return
        self._comm.traffic.add("all_gather", output_tensor.numel())
        for step in range(1, self._comm.size):  # each rank starts elsewhere, to spread the load
            rank = (self._comm.rank + step) % self._comm.size
            rows[rank].copy_(source.peers[rank])

    def _gather_through_group(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup
    ) -> None:
        self._comm.traffic.add("all_gather", output_tensor.numel())
        own = input_tensor.clone()  # gloo copies the input into the output
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        call(output_tensor, own, group=group)


class SharedReduceScatter(ReduceScatter):
    """Sums a unit's gradients; see ``FSDPModule.set_custom_reduce_scatter``.

    Args:
        comm: Does the work.
        ring: Of buffers for what is summed.
        factor: What the sum over ranks is multiplied by: 1 / N for the mean.
        observer: Is told when gradients are reduced.
    """

    def __init__(
        self, comm: Communicator, ring: BufferRing, factor: float, observer: Observer
    ) -> None:
        self._comm = comm
        self._ring = ring
        self._factor = factor
        self._observer = observer
        self._buffer: Buffer | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Lend the memory to be summed, then make that of the sum, which becomes gradients."""
        numel = math.prod(int(length) for length in size)
        if self._buffer is not None:
            return torch.empty(numel, dtype=dtype, device=device)
        self._buffer = self._ring.lend(numel, dtype)
        return self._buffer.tensor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> None:
        """Sum every rank's part and scale it. **Collective**."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.tensor.data_ptr() != input_tensor.data_ptr():
            raise RuntimeError("reduce-scatter of memory that was not allocated for it")
        with self._observer.phase("reduce"):
            self._comm.reduce_scatter(buffer, output_tensor, self._factor, add=False).wait()


@dataclass(frozen=True)
class Plugged:
    """What :func:`plug_in` leaves behind."""

    comm: Communicator
    ring: BufferRing
    published: Sequence[PublishedShards]

    def publish(self) -> None:
        """Show the other ranks this rank's new shards. **Collective**; nobody may be reading."""
        for unit in self.published:
            unit.write()
        self.comm.fence()

    def refresh(self) -> None:
        """Publish again if user code has written to a shard of any rank. **Collective**."""
        stale = not all(unit.is_current() for unit in self.published)
        if float(self.comm.sum(torch.tensor([stale], dtype=torch.float64))) > 0:
            self.publish()  # all ranks are here, so that nobody reads

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's memory."""
        buffers = [unit.buffer.tensor for unit in self.published if unit.buffer is not None]
        return [*self.ring.tensors, *buffers]


def plug_in(
    units: Sequence[FSDPModule],
    comm: Communicator,
    device: torch.device,
    factor: float,
    observer: Observer,
) -> Plugged:
    """Make ``fully_shard`` use our collectives. **Collective**.

    Args:
        units: All of them, the root last, laid out and started.
        comm: Over the ranks that the units are sharded over.
        device: Of the gathered parameters.
        factor: What the sum of the ranks' gradients is multiplied by.
        observer: Is told when gradients are reduced.

    Returns:
        The memory of the collectives.
    """
    ring = BufferRing(comm, device)
    published = []
    for unit in units:
        state = fully_shard.state(cast("nn.Module", unit))  # type: ignore[attr-defined]
        if (owner := state._fsdp_param_group) is not None:  # noqa: SLF001 - no public way
            published.append(PublishedShards(owner, comm, device))
            unit.set_custom_all_gather(SharedAllGather(comm, published[-1]))
        unit.set_custom_reduce_scatter(SharedReduceScatter(comm, ring, factor, observer))
        # The factor is applied here, once; these two keep fully_shard from dividing as well.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
    plugged = Plugged(comm, ring, published)
    plugged.publish()
    # Before the hook in which fully_shard begins to gather.
    root = cast("nn.Module", units[-1])
    root.register_forward_pre_hook(lambda *_: plugged.refresh(), prepend=True)
    return plugged
