"""Averaging over replicas: ranks with the same shards.

If states are sharded over a part of the data axis only, a rank's gradient is the mean over its
shard axis, and its replicas have other means. They are averaged once per step, before the norm is
computed. Averaging twice changes nothing, so it may happen at any time, and more gradients may be
added afterwards.

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

from zerotrial.engine.protocols import COMMUNICATION

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Traffic
    from zerotrial.engine.mesh import Axis
    from zerotrial.engine.protocols import Observer

__all__ = ["Replicas", "broadcast_module"]


class Replicas:
    """Ranks with the same shards as this one."""

    def __init__(self, axis: Axis, traffic: Traffic, observer: Observer) -> None:
        self._axis = axis
        self._traffic = traffic
        self._observer = observer
        self.count = axis.size
        """Number of replicas; 1 if no two ranks have the same shard."""

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over the replicas. **Collective**; waits.

        The result is bitwise equal on all replicas, so their updates stay equal.

        Args:
            tensors: (S,) Tensors of any float type; the same count and sizes on all replicas.
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


def broadcast_module(module: nn.Module, axis: Axis, device: torch.device) -> None:
    """Broadcast the first rank's parameters and buffers to its axis. **Collective**.

    Args:
        module: The same module on all ranks except for its values; meta tensors are skipped.
        axis: Mesh axis.
        device: Device for the transfer.
    """
    if axis.size == 1:
        return
    for value in (*module.parameters(), *module.buffers()):
        if value.numel() and not value.is_meta:
            on_device = value.data.to(device).contiguous()
            dist.broadcast(on_device, group=axis.group, group_src=0)
            value.data.copy_(on_device)
