"""Gradients of parameters tied over pipeline stages, summed over their owners."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zerotrial.engine.comm.communicator import Traffic

if TYPE_CHECKING:
    from zerotrial.engine.flat.gradients import Gradients
    from zerotrial.engine.flat.stages import FlatStage
    from zerotrial.engine.protocols import Observer

__all__ = ["TiedGradients"]


class TiedGradients:
    """Sums a stage's gradients of tied parameters.

    Each owner computes a part of the gradient, which is averaged over its data-parallel ranks like
    any other. The parts are added before the norm is taken. So every owner makes the same update,
    and the copies stay bitwise equal.
    """

    def __init__(self, stage: FlatStage, observer: Observer) -> None:
        tied = [(bucket.tie.key, bucket) for bucket in stage.buckets if bucket.tie is not None]
        # In the same order on all stages, whose bucket orders may differ.
        self._buckets = [bucket for _, bucket in sorted(tied, key=lambda item: item[0])]
        self._observer = observer
        self.traffic = Traffic()
        if tied:
            stage.change_averages = self._add

    def _add(self, gradients: Gradients) -> None:
        """Add the other owners' gradients. **Collective** over the owners."""
        with self._observer.phase("tied_gradients"):
            for bucket in self._buckets:
                assert bucket.tie is not None
                owners, local = bucket.tie.owners, gradients.result(bucket.index)
                wide = local.to(torch.promote_types(local.dtype, torch.float32))
                dist.all_reduce(wide, group=owners.group)
                if wide is not local:
                    local.copy_(wide)
                self.traffic.add("all_reduce", 2 * local.numel())
