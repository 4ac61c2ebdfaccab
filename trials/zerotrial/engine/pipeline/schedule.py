"""In which order chunks and micro-batches run: torch's schedules, by the configuration's names.

p pipeline stages, m micro-batches, c chunks on each rank, of which there are c m passes. The share
of time in which a rank waits, and what rank r of the p keeps until backward, where m is a multiple
of p, and never more than all c m:

=============  =========================  ===========================================
name           bubble                     activations kept, in passes of a chunk
=============  =========================  ===========================================
gpipe          (p - 1) / (m + p - 1)      m
1f1b           (p - 1) / (m + p - 1)      p - r
interleaved    (p - 1) / (c m + p - 1)    (c - 1) p + 2 (p - 1 - r) + 1
zero-bubble    about a third of 1f1b's    c p, the last r of them for weights' gradients
=============  =========================  ===========================================

References:
    Huang et al., GPipe, arXiv:1811.06965.
    Narayanan et al., PipeDream-2BW, arXiv:2006.09503; Megatron-LM, arXiv:2104.04473.
    Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolab.config.engine.parallel import ScheduleName
    from zerotrial.engine.pipeline.stage import ZeroStage

__all__ = ["make_schedule"]


def make_schedule(
    name: ScheduleName, stages: Sequence[ZeroStage], micro_batches: int, loss: Callable[..., Any]
) -> Any:
    """Build a schedule of ``torch.distributed.pipelining``.

    Args:
        name: Of the configuration.
        stages: This rank's chunks.
        micro_batches: Of a batch.
        loss: Of the last output and a micro-batch's number, scaled.
    """
    from torch.distributed.pipelining import (
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
    )

    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), micro_batches, **options)
    if name == "zero-bubble":
        return ScheduleInterleavedZeroBubble(list(stages), micro_batches, **options)
    (stage,) = stages
    # With fewer micro-batches than stages the two are one, which torch calls GPipe.
    gpipe = name == "gpipe" or micro_batches < stage.num_stages
    kind: Any = ScheduleGPipe if gpipe else Schedule1F1B
    return kind(stage, micro_batches, **options)
