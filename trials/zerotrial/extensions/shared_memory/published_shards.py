"""Shards of stage 3 that CPU ranks of one host read in shared memory.

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
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from zerotrial.engine.stage3.internals import UnitParameters

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_ALIGN = 32  # elements: a cache line in 16 bits, two in 32


def publish_shards(
    comm: Any, parameters: UnitParameters, meanwhile: Callable[[], None]
) -> PublishedShards | None:
    """Share a unit's shards with all ranks. **Collective**.

    Args:
        comm: Communicator of the ranks.
        parameters: Parameters of a unit that is laid out and started.
        meanwhile: Called whenever the gathered unit is needed, to advance pending reductions.

    Returns:
        None if forward modifies weights, or has several types of them.
    """
    kinds = {member.forward_dtype for member in parameters.members}
    if len(kinds) > 1 or _writes_to_weights(parameters):
        return None
    published = PublishedShards(parameters, comm, kinds.pop())
    numel = sum(full.numel() for full in published.wholes)
    parameters.read_in_place(
        published.wholes, meanwhile, lambda: comm.traffic.add("all_gather", numel)
    )
    return published


class PublishedShards:
    """One unit's shards as read by the other ranks."""

    def __init__(self, parameters: UnitParameters, comm: Any, dtype: torch.dtype) -> None:
        self._shards = [member.shard for member in parameters.members]
        self.wholes: list[Tensor] = []
        """Each full parameter, (N * S,), in shared memory."""
        self.tensors: list[Tensor] = []
        """This rank's shard of each, (S,)."""
        starts, end = [], 0
        for shard in self._shards:
            starts.append(end)
            end += -(-comm.size * shard.numel() // _ALIGN) * _ALIGN
        self._common = common = comm.allocate_shared(end, dtype)
        for shard, start in zip(self._shards, starts, strict=True):
            numel = shard.numel()
            own_start = start + comm.rank * numel
            self.wholes.append(common.part(start, start + comm.size * numel))
            self.tensors.append(common.part(own_start, own_start + numel))

    def is_current(self) -> bool:
        """Whether the shards still equal the published ones."""
        pairs = zip(self.tensors, self._shards, strict=True)
        return all(_same_bytes(home, shard.to(home.dtype)) for home, shard in pairs)

    def write(self) -> None:
        """Write the shards to shared memory, while no rank reads it."""
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
