"""Gradients of parameters tied over pipeline stages, summed over their owners.

Each owner computes a part of the gradient, which is averaged over its data-parallel ranks like any
other. The parts are added before the norm is taken. So every owner makes the same update, and the
copies stay bitwise equal.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerotrial.engine.comm.communicator import Communicator, Traffic
from zerotrial.engine.flat.gradients import Gradients
from zerotrial.engine.flat.layout import Bucket

__all__ = ["TiedGradients"]


class TiedGradients:
    """Tied buckets of a stage.

    Args:
        buckets: Buckets of the stage.
        comm: Communicator of the data-parallel ranks.
    """

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator) -> None:
        tied = [(bucket.tie.key, bucket) for bucket in buckets if bucket.tie is not None]
        # In the same order on all stages, whose bucket orders may differ.
        self._buckets = [bucket for _, bucket in sorted(tied, key=lambda item: item[0])]
        self._comm = comm
        self.traffic = Traffic()

    @property
    def exist(self) -> bool:
        """Whether this rank has tied buckets."""
        return bool(self._buckets)

    def add(self, gradients: Gradients) -> None:
        """Add the other owners' gradients. **Collective** over the owners, if there are any.

        Args:
            gradients: Gradients averaged over the data-parallel ranks.
        """
        if not self._buckets:
            return
        self._comm.fence()  # other ranks may still read what changes here
        for bucket in self._buckets:
            assert bucket.tie is not None
            owners, local = bucket.tie.owners, gradients.result(bucket.index)
            wide = local.to(torch.promote_types(local.dtype, torch.float32))
            dist.all_reduce(wide, group=owners.group)
            if wide is not local:
                local.copy_(wide)
            self.traffic.add("all_reduce", 2 * local.numel())
