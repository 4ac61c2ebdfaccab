"""Layouts of ranks for a model: pipeline stages x replicas x parts of a matrix, and ZeRO stage.

The formulas of traffic and bubble stand here, once; tests count beside them what an engine moves.

P is the number of trainable parameters that a rank has a part of (after pipe and tensor have
divided the model, before ZeRO does), m the micro-batches of a step, A the elements of one
micro-batch's activation between two blocks (tokens x features), p the pipeline stages, L a rank's
blocks. Elements are counted as in the ZeRO paper: a reduce-scatter or gather of E counts E, an
all-reduce 2 E.

References:
    Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7 (data).
    Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3 (tensor).
    Narayanan et al., Efficient Large-Scale Training on GPU Clusters, arXiv:2104.04473, section 2.2
    (pipe, bubble).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerolab.config.engine.parallel import ScheduleName
from zerolab.config.engine.pipelines import schedule_problems
from zerolab.sizes import size_text
from zerotrial.engine.memory import Device, MemoryEstimate, estimate, kept_activations
from zerotrial.engine.pipeline.schedule import kept_passes
from zerotrial.plan.noting import Kept, Noted

__all__ = [
    "Layout",
    "bubble",
    "data_traffic",
    "find_layouts",
    "pipe_traffic",
    "pipeline_activations",
    "reason",
    "recommend",
    "table",
    "tensor_traffic",
]

_MOST_TENSOR = 8
"""Ranks that one matrix is cut over at most: those of one machine."""

_WORTH = 2.0
"""How many times as much traffic a layout with fewer axes may have."""


def data_traffic(
    parameters: int,
    stage: int,
    micro_batches: int,
    ranks: int,
    *,
    shard: int | None = None,
    kept: Kept | None = None,
) -> int:
    """Elements that one rank moves along the data axis in a step.

    Args:
        parameters: P.
        stage: ZeRO stage.
        micro_batches: m.
        ranks: Along the axis.
        shard: Of them, how many have the states between them; None: all.
        kept: What stage 3 gathers less, or more, often; None: nothing of the kind.
    """
    if ranks == 1:
        return 0
    if stage == 0:
        return 2 * parameters
    shard = shard or ranks
    # Replicas of a shard all-reduce it once.
    between = 0 if shard == ranks else 2 * -(-parameters // shard)
    if shard == 1:
        return between
    if stage == 1:
        return 2 * parameters + between  # gradients once, and weights
    if stage == 2:
        return (micro_batches + 1) * parameters + between
    kept = kept or Kept()
    freed = parameters + kept.frozen - kept.to_backward - kept.between_steps
    gathered = micro_batches * (2 * freed + kept.to_backward) + kept.between_steps
    return gathered + micro_batches * parameters + between


def tensor_traffic(
    activation: int, blocks: int, micro_batches: int, ranks: int, *, ends: int = 2, logits: int = 0
) -> int:
    """Elements that one rank moves along the tensor axis in a step.

    Args:
        activation: A.
        blocks: L; each sums an activation twice forward and twice backward.
        micro_batches: m.
        ranks: Along the axis.
        ends: Whether embedding and head are cut on this rank: 0, 1 or 2 sums more.
        logits: Elements of the head's output, where it is gathered.
    """
    if ranks == 1:
        return 0
    return micro_batches * (2 * activation * (4 * blocks + ends) + logits)


def pipe_traffic(activation: int, micro_batches: int, stages: int, chunks: int = 1) -> int:
    """Elements that a rank sends along the pipe axis in a step: activations, and gradients.

    Of the rank that sends most: one between two others. Of two stages each is at an end, and has
    nobody to send the activations of its last chunk to, or the gradients of its first.
    """
    if stages == 1:
        return 0
    return (2 * chunks - (stages == 2)) * micro_batches * activation


def bubble(micro_batches: int, stages: int) -> float:
    """Share of a step in which a rank waits: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True)
class Layout:
    """One way to lay ranks out."""

    pipe: int
    data: int
    tensor: int
    micro_batches: int
    """In a step, on each rank."""

    estimate: MemoryEstimate
    """Bytes of the rank that has most."""

    activations: int
    """Bytes that blocks keep for backward, on the rank that has most."""

    data_traffic: int
    """Elements that one rank moves in a step."""

    tensor_traffic: int
    pipe_traffic: int
    bubble: float
    """Share of a step in which a rank waits."""

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.estimate.stage

    @property
    def traffic(self) -> int:
        """Elements of all axes."""
        return self.data_traffic + self.tensor_traffic + self.pipe_traffic

    @property
    def cost(self) -> float:
        """Elements of all axes, where an idle share counts as so much more."""
        return self.traffic / (1 - self.bubble)

    @property
    def axes(self) -> int:
        """How many, beside replicas."""
        return (self.pipe > 1) + (self.tensor > 1)

    @property
    def name(self) -> str:
        """Pipe x data x tensor."""
        return f"{self.pipe} x {self.data} x {self.tensor}"

    def to_dict(self) -> dict[str, Any]:
        """Write it for programs."""
        peaks = {"peak_device": self.estimate.peak_device, "peak_host": self.estimate.peak_host}
        return {**asdict(self), "stage": self.stage, "traffic": self.traffic, **peaks}


def find_layouts(noted: Noted, ranks: int, device: Device, tokens: int) -> Iterator[Layout]:
    """Estimate every layout that a model and its batch allow.

    Args:
        noted: The model.
        ranks: In all.
        device: What trains.
        tokens: Of one micro-batch, in a rank's forward.

    Yields:
        Layouts; whether they fit is not looked at.
    """
    shard = noted.config.zero_optimization.shard_ranks
    for pipe, data, tensor, stage in _sizes(noted, ranks):
        found = _estimate(noted, pipe, data, tensor, stage, device)
        micro_batches = noted.config.batch_sizes(data).accumulation_steps
        activation = tokens * noted.hidden
        blocks, ends = -(-noted.blocks // pipe), 2 if pipe == 1 else 1
        yield Layout(
            pipe=pipe,
            data=data,
            tensor=tensor,
            micro_batches=micro_batches,
            estimate=found,
            activations=_activations(noted, activation, pipe, micro_batches, tensor),
            data_traffic=data_traffic(
                _share(noted, pipe, tensor),
                stage,
                micro_batches,
                data,
                shard=shard,
                kept=noted.kept.scaled(_cut_to(noted, tensor)),
            ),
            tensor_traffic=tensor_traffic(activation, blocks, micro_batches, tensor, ends=ends),
            pipe_traffic=pipe_traffic(activation, micro_batches, pipe, noted.chunks),
            bubble=bubble(noted.chunks * micro_batches, pipe),
        )


def _sizes(noted: Noted, ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """Pipe, data, tensor and ZeRO stage that a model and its batch allow."""
    for tensor in range(1, min(ranks, _MOST_TENSOR) + 1):
        if ranks % tensor or (tensor > 1 and (not noted.cut or noted.hidden % tensor)):
            continue
        for pipe in range(1, ranks // tensor + 1):
            data, rest = divmod(ranks // tensor, pipe)
            if rest or (pipe > 1 and pipe * noted.chunks > noted.blocks):
                continue
            if noted.config.batch_problem(data) is None and _has_schedule(noted, pipe, data):
                divides = data % (noted.config.zero_optimization.shard_ranks or 1) == 0
                for stage in (0, 1, 2, 3) if pipe == 1 else (0, 1, 2):
                    # ZeRO divides over replicas
                    if stage == 0 or (data > 1 and divides):
                        yield pipe, data, tensor, stage


def _has_schedule(noted: Noted, pipe: int, data: int) -> bool:
    """Whether the schedule of the file runs on so many stages."""
    config, steps = noted.config, noted.config.batch_sizes(data).accumulation_steps
    compiled = config.compile.enabled
    name, chunks = config.pipeline.schedule, noted.chunks
    return pipe == 1 or not schedule_problems(name, pipe, steps, chunks=chunks, compiled=compiled)


def _share(noted: Noted, pipe: int, tensor: int) -> int:
    """Trainable elements of the rank that has most: blocks are divided evenly, ends are not."""
    inside = min(noted.in_blocks, noted.parameters)
    ends = noted.parameters - inside
    return math.ceil(_cut_to(noted, tensor) * (-(-inside // pipe) + ends))


def _cut_to(noted: Noted, tensor: int) -> float:
    """Share of the trainable elements that a rank has when matrices are cut."""
    cut = min(noted.cut, noted.parameters)
    return (noted.parameters - cut + -(-cut // tensor)) / max(noted.parameters, 1)


def _estimate(  # noqa: PLR0917 - the axes, in their order
    noted: Noted, pipe: int, data: int, tensor: int, stage: int, device: Device
) -> MemoryEstimate:
    config = noted.config
    accumulate = config.data_types.grad_accum_dtype
    if accumulate is None and config.sums_micro_batches(
        config.batch_sizes(data).accumulation_steps
    ):
        accumulate = "fp32"
    elements = _share(noted, pipe, tensor)
    return estimate(
        elements,
        min(elements, -(-noted.largest_block // tensor)),
        config.zero_optimization.shard_ranks or data,
        stage,
        precision=config.dtype,
        optimizer=noted.optimizer,
        grad_accum_dtype=accumulate,
        communication_data_type=config.communication_data_type,
        bucket_numel=min(config.zero_optimization.reduce_bucket_size, elements),
        device=device,
    )


def _activations(noted: Noted, activation: int, pipe: int, micro_batches: int, tensor: int) -> int:
    """What blocks keep, as transformers do, on the rank that has most."""
    checkpointing = noted.config.activation_checkpointing
    width = 4 if noted.config.dtype == "fp32" else 2
    if pipe > 1:
        return max(
            pipeline_activations(
                activation,
                -(-noted.blocks // (pipe * noted.chunks)),
                schedule=noted.config.pipeline.schedule,
                stages=pipe,
                rank=rank,
                micro_batches=micro_batches,
                chunks=noted.chunks,
                interval=noted.interval,
                width=width,
                tensor=tensor,
                sequence_parallel=noted.sequence_parallel,
                partitioned=checkpointing.partition_activations,
                on_host=checkpointing.cpu_checkpointing,
            )
            for rank in range(pipe)
        )
    acts = not noted.is_pipeline
    return kept_activations(
        activation,
        noted.blocks,
        width=width,
        tensor=tensor,
        sequence_parallel=noted.sequence_parallel,
        checkpointing=checkpointing.active if acts else noted.interval > 0,
        interval=1 if acts else noted.interval,
        partitioned=checkpointing.partition_activations,
        on_host=checkpointing.cpu_checkpointing,
    )


def pipeline_activations(
    activation: int,
    blocks: int,
    *,
    schedule: ScheduleName,
    stages: int,
    rank: int,
    micro_batches: int,
    chunks: int = 1,
    interval: int = 0,
    width: int = 2,
    tensor: int = 1,
    sequence_parallel: bool = False,
    scores: float = 0.0,
    partitioned: bool = False,
    on_host: bool = False,
) -> int:
    """Bytes that one rank of a pipeline holds at most for its backwards.

    They are, for every pass of a chunk whose backward is to come, what its blocks keep, and its
    output; and, however few of these there are, room to receive the activations and the gradients
    of all micro-batches, which torch's schedules make once and keep. What a chunk has received is
    the input of its first block, and counts once. What ``interleaved`` and ``zero-bubble`` have
    sent stays until the end of the batch.

    Args:
        activation: s b h of one micro-batch.
        blocks: Of a chunk.
        schedule: Of the configuration.
        stages: Ranks of the pipeline.
        rank: Which of them.
        micro_batches: Of a batch.
        chunks: On each rank.
        interval: Blocks that are computed again together; 0 keeps all activations.
        width: Bytes of an element.
        tensor: Ranks that matrices are cut over.
        sequence_parallel: Whether norms and dropouts are cut along the tokens.
        scores: a s / h, where attention keeps its scores.
        partitioned: Whether tensor ranks share the inputs of blocks that are computed again, but
            for what a chunk has received.
        on_host: Whether they wait in host memory.
    """
    passes = kept_passes(schedule, stages, rank, micro_batches, chunks)
    inside = kept_activations(
        activation,
        blocks,
        in_flight=passes,
        width=width,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        scores=scores,
        checkpointing=interval > 0,
        interval=interval,
        partitioned=partitioned,
        on_host=on_host,
        received=True,
    )
    first, last = rank == 0, rank == stages - 1
    # A rank's chunks take turns. The model's first has received nothing, its last sends nothing.
    of_one = -(-passes // chunks)
    outputs = passes
    if schedule in {"interleaved", "zero-bubble"}:
        done = chunks * micro_batches - passes
        outputs = micro_batches * (chunks - last) + last * of_one
        outputs += done - first * (done // chunks)  # gradients
    rooms = micro_batches * (2 * chunks - first - last)
    counted = passes - first * of_one
    return inside + width * activation * (outputs + rooms - counted)


def recommend(layouts: Sequence[Layout]) -> Layout | None:
    """Choose among layouts that fit.

    Pipeline stages and cut matrices ask for a model that is written, or divided, for them. So the
    layout with the fewest axes is taken whose cost is within :data:`_WORTH` times the least; among
    those, the cheapest.
    """
    least = min((one.cost for one in layouts), default=0.0)
    near = [one for one in layouts if one.cost <= _WORTH * least]
    return min(near, key=lambda one: (one.axes, one.cost, one.stage), default=None)


def reason(best: Layout, layouts: Sequence[Layout], width: int) -> str:
    """Say why a layout is recommended.

    Args:
        best: It.
        layouts: That fit.
        width: Bytes of an element on its way.
    """
    least = min(layouts, key=lambda one: one.cost)
    text = f"recommended: {best.name} at stage {best.stage}"
    if best.cost <= least.cost:
        return f"{text}: of those that fit, it moves the least in a step"
    sizes = f"{size_text(width * least.cost)} in place of {size_text(width * best.cost)}"
    return (
        f"{text}: {least.name} moves less ({sizes}, waiting counted), but pipeline stages need a "
        "model that is written as a list of layers, and cut matrices a plan; that is worth it "
        "where the network is slow"
    )


def table(
    layouts: Sequence[Layout], best: Layout | None, width: int, configured: Layout | None = None
) -> list[str]:
    """Write layouts as lines.

    Args:
        layouts: That fit.
        best: The one that is recommended.
        width: Bytes of an element on its way.
        configured: The one that the trial asks for now.
    """
    titles = ("on device", "working set", "activations", "data", "tensor", "pipe", "bubble")
    rows: list[tuple[str, ...]] = [("pipe x data x tensor", "stage", *titles, "")]
    for one in sorted(layouts, key=lambda one: one.cost):
        traffic = (one.data_traffic, one.tensor_traffic, one.pipe_traffic)
        marks = {"as configured": configured, "recommended": best}
        rows.append(
            (
                one.name,
                str(one.stage),
                size_text(one.estimate.device),
                size_text(one.estimate.working),
                size_text(one.activations),
                *(size_text(width * each) if each else "-" for each in traffic),
                f"{one.bubble:.0%}" if one.pipe > 1 else "-",
                ", ".join(mark for mark, marked in marks.items() if one == marked),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        texts = [c.rjust(w) if 1 < at < 9 else c.ljust(w) for c, w, at in cells]
        lines.append("  ".join(texts).rstrip())
    return lines
