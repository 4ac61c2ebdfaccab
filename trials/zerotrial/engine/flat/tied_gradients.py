"""Gradients of parameters that several pipeline stages have: added up over their owners.

Each owner makes a part of the gradient, which is averaged over its data-parallel ranks like any
other. Then the parts are added, before the norm is taken, so that every owner makes the same update
and the copies stay equal to the last bit.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerotrial.engine.comm.communicator import Communicator, Traffic
from zerotrial.engine.flat.gradients import Gradients
from zerotrial.engine.flat.layout import Bucket

__all__ = ["Ties"]


class Ties:
    """The tied buckets of a stage.

    Args:
        buckets: Of the stage.
        comm: Between the data-parallel ranks.
    """

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator) -> None:
        tied = [(bucket.tie.key, bucket) for bucket in buckets if bucket.tie is not None]
        # One order on all stages, whatever order they have their buckets in.
        self._buckets = [bucket for _, bucket in sorted(tied, key=lambda item: item[0])]
        self._comm = comm
        self.traffic = Traffic()

    @property
    def exist(self) -> bool:
        """Whether there are any on this rank."""
        return bool(self._buckets)

    def add(self, gradients: Gradients) -> None:
        """Add what the other owners have. **Collective** over them, if there are any.

        Args:
            gradients: Averaged over the data-parallel ranks.
        """
        if not self._buckets:
            return
        self._comm.fence()  # others may still read what is changed here
        for bucket in self._buckets:
            assert bucket.tie is not None
            owners, own = bucket.tie.owners, gradients.result(bucket.index)
            wide = own.to(torch.promote_types(own.dtype, torch.float32))
            dist.all_reduce(wide, group=owners.group)
            if wide is not own:
                own.copy_(wide)
            self.traffic.add("all_reduce", 2 * own.numel())
