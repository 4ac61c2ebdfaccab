"""In which order chunks and micro-batches run: torch's schedules, by the configuration's names.

p pipeline stages, m micro-batches, c chunks on each rank. The share of time in which a rank waits:

=============  =========================  ===========================================
name           bubble                     activations kept on the first rank
=============  =========================  ===========================================
gpipe          (p - 1) / (m + p - 1)      of m micro-batches
1f1b           (p - 1) / (m + p - 1)      of min(m, p)
interleaved    (p - 1) / (c m + p - 1)    of about p (1 + (p - 1) / (c p))
zero-bubble    about a third of 1f1b's    as interleaved, and what weights' gradients need
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

__all__ = ["make_schedule", "schedule_problems"]


def schedule_problems(
    name: ScheduleName, stages: int, chunks: int, micro_batches: int, *, compiled: bool
) -> list[str]:
    """Say why a schedule cannot run; nothing if it can.

    Args:
        name: Of the configuration.
        stages: Ranks of a pipeline.
        chunks: On each rank.
        micro_batches: Of a batch.
        compiled: Whether the model is compiled.
    """
    problems = []
    if name in {"1f1b", "gpipe"} and chunks > 1:
        problems.append(
            f"pipeline.schedule: must be interleaved or zero-bubble for a PipelineModule of "
            f"{chunks} chunks a rank, got {name}; or build it with chunks=1"
        )
    if name == "interleaved" and chunks == 1:
        problems.append(
            "pipeline.schedule: interleaved needs several chunks a rank, got 1; build the "
            "PipelineModule with chunks=2"
        )
    if name == "zero-bubble" and compiled:
        problems.append(
            "compile.enabled: must be false with pipeline.schedule zero-bubble, which splits "
            "backward; use 1f1b or interleaved"
        )
    rounds = max(1, micro_batches // stages)
    if name in {"interleaved", "zero-bubble"} and micro_batches % rounds:
        problems.append(
            f"gradient_accumulation_steps: must be a multiple of {rounds} (accumulation steps // "
            f"pipeline stages) for {name}, got {micro_batches}; a multiple of the {stages} "
            "pipeline stages always is"
        )
    return problems


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
