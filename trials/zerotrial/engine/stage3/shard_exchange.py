"""Exchange of shards between CPU ranks at stage 3.

Ranks that share memory gather units without sending or copying. Weights change only when the
optimizer steps. After a step each rank publishes its shards, in the type of forward, in memory that
all ranks map, and all ranks meet once. Each parameter then lies there in full, and forward and
backward read it in place:

    memory       [--------- p0 ---------][------------------ p1 ------------------]
    written by   [rank 0 ][rank 1 ][ ...][   rank 0    ][   rank 1    ][   ...    ]

Before a rank publishes again, the norm of the gradient has been reduced. No rank can therefore
still be in a forward or backward that reads. User code may write to weights as well, for example to
clip them. The ranks therefore compare once per forward of the model, and publish again if any shard
has changed.

Between hosts a unit is gathered through torch.distributed into memory of its own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerotrial.engine.comm.communicator import Communicator
from zerotrial.engine.protocols import COMMUNICATION
from zerotrial.engine.stage3.internals import AllGather, UnitParameters, set_all_gather

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.protocols import Observer

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_ALIGN = 32  # elements: a cache line in 16 bits, two in 32


def publish_shards(
    unit: FSDPModule,
    parameters: UnitParameters,
    comm: Communicator,
    meanwhile: Callable[[], None],
    observer: Observer,
) -> PublishedShards:
    """Share a unit's shards with all ranks. **Collective**.

    Args:
        unit: A unit that is laid out and started.
        parameters: Parameters of the unit.
        comm: Communicator of the ranks.
        meanwhile: Called whenever the gathered unit is needed, to advance pending reductions.
        observer: Times gathering between hosts.
    """
    published = PublishedShards(parameters, comm)
    if published.wholes:
        numel = sum(full.numel() for full in published.wholes)
        parameters.read_in_place(
            published.wholes, meanwhile, lambda: comm.traffic.add("all_gather", numel)
        )
    else:
        set_all_gather(unit, GroupAllGather(comm, observer))
    return published


class PublishedShards:
    """One unit's shards as read by the other ranks.

    Args:
        parameters: Parameters of the unit.
        comm: Communicator of the ranks.
    """

    def __init__(self, parameters: UnitParameters, comm: Communicator) -> None:
        members = parameters.members
        self._shards = [member.shard for member in members]
        self.wholes: list[Tensor] = []
        """Each full parameter, (N * S,), in shared memory; empty without shared memory."""
        self.tensors: list[Tensor] = []
        """This rank's shard of each, (S,)."""
        kinds = {member.forward_dtype for member in members}
        if len(kinds) > 1 or _writes_to_weights(parameters):
            return
        starts, end = [], 0
        for shard in self._shards:
            starts.append(end)
            end += -(-comm.size * shard.numel() // _ALIGN) * _ALIGN
        self._common = common = comm.allocate_shared(end, kinds.pop())
        if common is None:
            return
        for shard, start in zip(self._shards, starts, strict=True):
            numel = shard.numel()
            own_start = start + comm.rank * numel
            self.wholes.append(common.part(start, start + comm.size * numel))
            self.tensors.append(common.part(own_start, own_start + numel))

    def is_current(self) -> bool:
        """Whether the shards still equal the published ones."""
        pairs = zip(self.tensors, self._shards, strict=bool(self.tensors))
        return all(_same_bytes(home, shard.to(home.dtype)) for home, shard in pairs)

    def write(self) -> None:
        """Write the shards to shared memory, while no rank reads it."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, self._shards)


def _same_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether two host tensors have equal bytes; twice as fast as ``torch.equal``."""
    nbytes = first.numel() * first.element_size()
    return bool(_compare(first.data_ptr(), second.data_ptr(), nbytes) == 0)


def _writes_to_weights(parameters: UnitParameters) -> bool:
    """Whether forward modifies weights, which shared memory does not allow."""
    return any(
        isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        for module in parameters.modules
    )


class GroupAllGather(AllGather):
    """Gathers a unit's parameters between hosts; see ``FSDPModule.set_custom_all_gather``.

    Args:
        comm: Counts the traffic.
        observer: Times the gathering.
    """

    def __init__(self, comm: Communicator, observer: Observer) -> None:
        self._comm = comm
        self._observer = observer

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the memory of the gathered unit."""
        return torch.empty(math.prod(int(length) for length in size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> None:
        """Fill the other ranks' shards. **Collective**."""
        self._comm.traffic.add("all_gather", output_tensor.numel())
        shard = input_tensor.clone()  # gloo copies the input into the output
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._observer.phase(COMMUNICATION):
            call(output_tensor, shard, group=group)
