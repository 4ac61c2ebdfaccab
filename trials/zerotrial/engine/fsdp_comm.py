"""Stage 3's collectives on CPU, in place of those that ``fully_shard`` comes with.

As shipped it calls gloo, whose reduce-scatter is an all-reduce inside and whose data pass through
sockets. Here a unit is gathered and reduced in memory that the ranks share, or through the
engine's own all-to-all where they are on different hosts.

N ranks, S elements of a unit on each: what is gathered or reduced has N * S elements, and rank r's
part is the r-th S, exactly as in a :class:`~zerotrial.engine.comm.Buffer`.

A buffer may be filled again when no rank reads it any more. Every rank finishes one collective
before it begins the next but one, so a ring of three buffers is enough, unless ``fully_shard``
still holds what was gathered into the next one: then the ring grows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from zerotrial.engine.comm import Buffer, Communicator

if TYPE_CHECKING:
    import torch.distributed as dist
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
        self._lent: list[weakref.ref[Tensor] | None] = []
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
        if index < len(self._slots):
            lent = self._lent[index]
            if lent is not None and lent() is not None:
                self._slots.insert(index, self._allocate(nbytes))
                self._lent.insert(index, None)
            elif self._slots[index].tensor.numel() < nbytes:
                self._slots[index] = self._allocate(nbytes)
        else:
            self._slots.append(self._allocate(nbytes))
            self._lent.append(None)
        self._next = (index + 1) % max(_RING, len(self._slots))
        buffer = self._slots[index].part(0, nbytes).cast(dtype)
        self._lent[index] = weakref.ref(buffer.tensor)
        return buffer

    def _allocate(self, nbytes: int) -> Buffer:
        return self._comm.allocate(nbytes, torch.uint8, self._device)


class SharedAllGather(AllGather):
    """Gathers a unit's parameters; see ``FSDPModule.set_custom_all_gather``."""

    def __init__(self, comm: Communicator, ring: BufferRing) -> None:
        self._comm = comm
        self._ring = ring
        self._buffer: Buffer | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Lend the memory into which a unit is gathered; each rank fills its own part."""
        self._buffer = self._ring.lend(math.prod(int(length) for length in size), dtype)
        return self._buffer.tensor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> None:
        """Fill the other ranks' parts. **Collective**."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.tensor.data_ptr() != output_tensor.data_ptr():
            raise RuntimeError("all-gather into memory that was not allocated for it")
        self._comm.all_gather(buffer).wait()


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


def plug_in(
    units: Sequence[FSDPModule],
    comm: Communicator,
    device: torch.device,
    factor: float,
    observer: Observer,
) -> list[BufferRing]:
    """Make ``fully_shard`` use our collectives. **Collective**.

    Args:
        units: All of them, the root last.
        comm: Over the ranks that the units are sharded over.
        device: Of the gathered parameters.
        factor: What the sum of the ranks' gradients is multiplied by.
        observer: Is told when gradients are reduced.

    Returns:
        The rings of buffers, which hold the memory of the collectives.
    """
    gathered, summed = BufferRing(comm, device), BufferRing(comm, device)
    for unit in units:
        unit.set_custom_all_gather(SharedAllGather(comm, gathered))
        unit.set_custom_reduce_scatter(SharedReduceScatter(comm, summed, factor, observer))
        # The factor is applied here, once; these two keep fully_shard from dividing as well.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
    return [gathered, summed]
