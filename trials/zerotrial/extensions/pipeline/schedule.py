"""Pipeline schedules: torch's, by the configuration's names.

p pipeline stages, m micro-batches, c chunks per rank, that is c m passes. Share of time in which a
rank waits, and activations that rank r of the p keeps until backward, if m is a multiple of p, at
most all c m:

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

# ruff: noqa: SLF001 - API missing before torch 2.10

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolab.config.engine.parallel import ScheduleName
    from zerotrial.extensions.pipeline.stage import ZeroStage

__all__ = ["make_schedule"]


def make_schedule(
    name: ScheduleName, stages: Sequence[ZeroStage], micro_batches: int, loss: Callable[..., Any]
) -> Callable[..., Any]:
    """Build a schedule of ``torch.distributed.pipelining`` that keeps no outputs.

    Args:
        name: Name of the schedule.
        stages: This rank's chunks.
        micro_batches: Number of micro-batches.
        loss: Scaled loss of the last output and a micro-batch's number.

    Returns:
        Its ``step`` method.
    """
    schedule = _schedule(name, stages, micro_batches, loss)
    step: Callable[..., Any] = schedule.step
    if "return_outputs" in signature(step).parameters:  # torch 2.10
        return partial(step, return_outputs=False)
    schedule._merge_outputs = lambda _: None  # the stages keep no outputs
    return step


def _schedule(
    name: ScheduleName, stages: Sequence[ZeroStage], micro_batches: int, loss: Callable[..., Any]
) -> Any:
    from torch.distributed.pipelining import (
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
    )
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if name in {"interleaved", "zero-bubble"}:
        interleaves = name == "interleaved"
        several = ScheduleInterleaved1F1B if interleaves else ScheduleInterleavedZeroBubble
        schedule: Any = several(list(stages), micro_batches, **options)
        if isinstance(schedule, _PipelineScheduleRuntime):
            return schedule
        # Before torch 2.10 these start all simultaneous transfers together. With fewer
        # micro-batches than stages they hang, or compute with data that has not arrived.
        make_runtime: Any = _PipelineScheduleRuntime
        runtime = make_runtime(list(stages), micro_batches, **options)
        load = getattr(runtime, "_prepare_schedule_with_comms", None) or runtime._load_actions
        load(schedule.pipeline_order)
        return runtime
    # In steady state 1F1B sends an activation forward while it receives a gradient from the same
    # neighbour. Both ranks must start the two together (batch_isend_irecv): two blocking sends
    # would wait for each other. With fewer micro-batches than stages there is no steady state.
    (stage,) = stages
    # With fewer micro-batches than stages both are the same, which torch calls GPipe.
    gpipe = name == "gpipe" or micro_batches < stage.num_stages
    kind: Any = ScheduleGPipe if gpipe else Schedule1F1B
    try:
        return kind(stage, micro_batches, **options)
    except ValueError:  # before torch 2.8 GPipe rejects them, too
        schedule = kind(stage, stage.num_stages, **options)
        schedule._n_microbatches = micro_batches
        return schedule
