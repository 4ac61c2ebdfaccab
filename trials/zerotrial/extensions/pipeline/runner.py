"""Runner of one rank's chunks: by a schedule to train, and in order to evaluate.

A schedule must know the signatures of its chunks' inputs and outputs. They are determined with the
first micro-batch of each shape, which passes through all chunks without a trace: random generators
and buffers are restored. It is repeated when weights are frozen or unfrozen on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerotrial.extensions.pipeline.schedule import make_schedule
from zerotrial.extensions.pipeline.single_stage import Passes
from zerotrial.extensions.pipeline.stage import FirstChunk, ZeroStage, stage_class
from zerotrial.extensions.pipeline.timed_transfers import timed_transfers_of
from zerotrial.extensions.pipeline.transfer import Signature, Transfer

if TYPE_CHECKING:
    from zerolab.config.engine.parallel import ScheduleName
    from zerotrial.engine.flat.stages import FlatStage
    from zerotrial.engine.mesh import Axis
    from zerotrial.engine.protocols import Observer
    from zerotrial.extensions.pipeline.failure import Failures
    from zerotrial.extensions.pipeline.micro_batches import MicroBatches
    from zerotrial.extensions.pipeline.module import PipelineModule

__all__ = ["Runner"]

_CACHED_PLANS = 8
"""Number of cached schedules; each has buffers for its activations."""

Loss = Callable[[Any, Any], Tensor]


@dataclass
class _Plan:
    """Schedule for micro-batches of one shape."""

    step: Callable[..., Any]
    """Method of the schedule."""

    stages: list[ZeroStage]
    sends: int
    """Elements that this rank sends per micro-batch, forward and backward."""

    moving: list[Tensor]
    """Buffers that a forward changes."""


class Runner:
    """Runner of this rank's chunks."""

    def __init__(
        self, module: PipelineModule, pipe: Axis, device: torch.device, schedule: ScheduleName
    ) -> None:
        self._module = module
        self._pipe = pipe
        self._device = device
        self._name = schedule
        self._total = module.num_stages * module.chunks
        self._recomputes = module.activation_checkpoint_interval > 0
        self._chunks = {position: module.chunk(position) for position in module.own_chunks}
        self._feed = FirstChunk(self._chunks[0]) if 0 in self._chunks else None
        self._plans: dict[tuple[int, int], _Plan] = {}
        # state of the current batch
        self._labels: list[Any] = []
        self._losses: list[Tensor] = []
        self._loss: Loss | None = None
        self._factor = 1.0
        self._failures: Failures | None = None
        self._before: list[tuple[Tensor, Tensor]] = []
        self.sent = 0
        """Elements sent to other stages while training."""

    def train(  # noqa: PLR0917 - one caller
        self,
        drawn: MicroBatches,
        count: int,
        stage: FlatStage,
        observer: Observer,
        loss: Loss,
        factor: float,
        failures: Failures,
    ) -> list[Tensor]:
        """Run a schedule, forward and backward. **Collective** over the pipeline.

        After a failure on any rank, :meth:`forget_batch` must follow on all.

        Args:
            drawn: Micro-batches.
            count: Number of micro-batches.
            stage: ZeRO stage that accumulates the gradients.
            observer: The engine's observer.
            loss: Function of an output and its labels.
            factor: Factor of the losses before backward.
            failures: Failures of the batch.

        Returns:
            Losses, on the last stage.
        """
        key = count, drawn.kind
        passes = Passes(stage, observer, failures, count * len(self._chunks))
        plan = self._plans.pop(key, None) or self._build_plan(drawn, count, failures)
        if plan is None:
            passes.skip_all()
            return []
        self._labels, self._losses = drawn.labels, []
        self._loss, self._factor, self._failures = loss, factor, failures
        self._before = [(value, value.clone()) for value in plan.moving]
        for chunk_stage in plan.stages:
            chunk_stage.passes = passes
        if self._feed is not None:
            self._feed.inputs = drawn.inputs
        numbers = torch.arange(count)
        last = self._total - 1 in self._chunks
        with timed_transfers_of(observer):
            plan.step(
                *((numbers,) if self._feed is not None else ()), target=numbers if last else None
            )
        self._plans[key] = plan  # an error leaves a plan in the middle: it is not kept
        while len(self._plans) > _CACHED_PLANS:
            self._plans.pop(next(iter(self._plans)))
        self.sent += count * plan.sends
        losses, self._losses, self._labels, self._loss = self._losses, [], [], None
        return losses

    def forget_batch(self) -> None:
        """Undo a batch that failed on any rank; call it on all ranks."""
        self._plans.clear()  # an interrupted plan is unusable; all ranks build a new one
        for value, before in self._before:
            value.copy_(before)

    def _scaled_loss(self, output: Any, number: Tensor) -> Tensor:
        assert self._loss is not None
        assert self._failures is not None
        if not self._failures:
            with self._failures.catching(int(number)):
                loss = self._loss(output, self._labels[int(number)])
                self._losses.append(loss.detach().float())
                return loss * self._factor
        return torch.zeros(())  # no backward follows

    def _build_plan(self, drawn: MicroBatches, count: int, failures: Failures) -> _Plan | None:
        """Determine signatures and build a schedule; None if any rank of the pipeline fails."""
        signatures: dict[int, tuple[Signature | None, Signature]] = {}
        moving: list[Tensor] = []
        self._before = []
        with self._state_restored(moving), torch.enable_grad():
            for position, received, outputs in self._run_in_order(drawn.inputs[:1], 1, failures):
                with failures.catching(0):
                    received_signature = Signature.of(received[0]) if position else None
                    signatures[position] = received_signature, Signature.of(outputs)
        with failures.catching(0):
            self._module.check_ties(moving)
        failed = torch.tensor(float(bool(failures)), device=self._device)
        dist.all_reduce(failed, group=self._pipe.group)
        if failed:
            return None
        make_stage = stage_class()
        stages = [
            make_stage(
                chunk if position or self._feed is None else self._feed,
                position,
                self._total,
                self._pipe,
                self._device,
                received=signatures[position][0],
                outputs=signatures[position][1],
                ends=self._module.end_of(position),
                splits=self._name == "zero-bubble",
                recomputes=self._recomputes,
            )
            for position, chunk in self._chunks.items()
        ]
        sends = 0
        for position, (before, after) in signatures.items():
            sends += 0 if before is None else _numel(before, flowing=True)
            sends += 0 if position == self._total - 1 else _numel(after)
        step = make_schedule(self._name, stages, count, self._scaled_loss)
        return _Plan(step, stages, sends, moving)

    def evaluate(self, drawn: MicroBatches, count: int, failures: Failures) -> list[Any] | None:
        """Run micro-batches forward. **Collective** over the pipeline.

        Returns:
            Outputs, on the last stage.
        """
        last = self._total - 1
        outputs = [
            out
            for position, _, out in self._run_in_order(drawn.inputs, count, failures)
            if position == last
        ]
        return outputs if last in self._chunks else None

    def _run_in_order(
        self, inputs: list[tuple[Any, ...]], count: int, failures: Failures
    ) -> Iterator[tuple[int, tuple[Any, ...], Any]]:
        """Run chunk after chunk on all micro-batches; sends do not wait for receivers.

        After a failure nothing more is run or yielded, on this rank and on later stages.
        """
        transfer = Transfer(self._pipe, self._device)
        for position, index in self._order(count):
            origin = (self._pipe.rank - 1) % self._pipe.size
            received = inputs[index] if position == 0 else _as_argument(transfer.receive(origin))
            destination = (self._pipe.rank + 1) % self._pipe.size
            if received is not None and not failures:
                with failures.catching(index):
                    output = self._chunks[position](*received)
                    if position < self._total - 1:
                        transfer.send(output, destination)
                    yield position, received, output
                    continue
            if position < self._total - 1:
                transfer.send_nothing(destination)
        transfer.finish()

    def _order(self, count: int) -> list[tuple[int, int]]:
        """Return the order of chunks and micro-batches.

        Between two ranks one connection serves both directions, and NCCL processes it in order of
        start. So with two ranks each micro-batch passes all chunks before the next one, and both
        ranks start their transfers in the same order.
        """
        if self._pipe.size == 2:
            return [(position, index) for index in range(count) for position in self._chunks]
        return [(position, index) for position in self._chunks for index in range(count)]

    @contextmanager
    def _state_restored(self, moving: list[Tensor]) -> Iterator[None]:
        """Restore random generators and buffers after the block.

        Args:
            moving: Receives the buffers that were changed.
        """
        buffers = [value for chunk in self._chunks.values() for value in chunk.buffers()]
        before = [value.clone() for value in buffers]
        cuda = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            yield
        for value, old in zip(buffers, before, strict=True):
            if not torch.equal(value, old):
                value.copy_(old)
                moving.append(value)


def _as_argument(value: Any) -> tuple[Any] | None:
    """Wrap a received value as the argument of a chunk; None without a value."""
    return None if value is None else (value,)


def _numel(signature: Signature, *, flowing: bool = False) -> int:
    """Return the number of elements; if ``flowing``, only of tensors with a gradient."""
    parts = signature.parts
    return sum(torch.Size(shape).numel() for shape, _, flows in parts if flows or not flowing)
