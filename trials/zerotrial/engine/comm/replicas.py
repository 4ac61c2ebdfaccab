"""Ranks that have the same shards: what they make of them is averaged.

Where states are sharded over a part of the data axis only, a rank's gradient is the mean over the
ranks of its shard axis, and the others like it have means of their own. These are averaged once in
a step, before the norm is taken. To average what has been averaged changes nothing, so that it may
be done at any moment, and gradients be added afterwards.

References:
    Zhang et al., MiCS, arXiv:2205.00119, section 3.4.
    Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerotrial.engine.comm.timed_collectives import COMMUNICATION

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Traffic
    from zerotrial.engine.mesh import Axis
    from zerotrial.engine.protocols import Observer

__all__ = ["Replicas", "copy_first"]


class Replicas:
    """The ranks that have the same shards as this one.

    Args:
        axis: They.
        traffic: Counts what they exchange.
        observer: Is told when they do.
    """

    def __init__(self, axis: Axis, traffic: Traffic, observer: Observer) -> None:
        self._axis = axis
        self._traffic = traffic
        self._observer = observer

    @property
    def count(self) -> int:
        """How many; 1 where every rank has a shard of its own."""
        return self._axis.size

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Put the mean over the replicas into each tensor. **Collective**; waits.

        Every replica has the same bits afterwards, and so goes on alike.

        Args:
            tensors: (S,) each, of any float type; the same in number and size on all of them.
        """
        if self.count == 1:
            return
        with self._observer.phase(COMMUNICATION):
            group = self._axis.group
            works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
            for work, tensor in zip(works, tensors, strict=True):
                work.wait()
                tensor.div_(self.count)
                self._traffic.add("all_reduce", 2 * tensor.numel())


def copy_first(module: nn.Module, axis: Axis, device: torch.device) -> None:
    """Give every rank of an axis the first one's parameters and buffers. **Collective**.

    Args:
        module: The same on all of them but for its values; what is on the meta device stays so.
        axis: The ranks.
        device: Where values travel.
    """
    if axis.size == 1:
        return
    for value in (*module.parameters(), *module.buffers()):
        if value.numel() and not value.is_meta:
            there = value.data.to(device).contiguous()
            dist.broadcast(there, group=axis.group, group_src=0)
            value.data.copy_(there)
