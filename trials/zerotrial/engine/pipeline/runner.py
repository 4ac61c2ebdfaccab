"""Runs the chunks of one rank: under a schedule to train, and straight through to evaluate.

A schedule must know what its chunks receive and give. That is found out with the first micro-batch
of each shape, which goes once through all chunks, and leaves no trace: random generators and
buffers are put back; and anew where weights are frozen, or thawed, on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerotrial.engine.pipeline.schedule import make_schedule
from zerotrial.engine.pipeline.single_stage import Passes
from zerotrial.engine.pipeline.stage import Feed, ZeroStage, stage_class
from zerotrial.engine.pipeline.timed_transfers import observed_transfers
from zerotrial.engine.pipeline.transfer import Signature, Transfer

if TYPE_CHECKING:
    from zerolab.config.engine.parallel import ScheduleName
    from zerotrial.engine.flat.stages import FlatStage
    from zerotrial.engine.mesh import Axis
    from zerotrial.engine.pipeline.failure import Failures
    from zerotrial.engine.pipeline.micro_batches import MicroBatches
    from zerotrial.engine.pipeline.module import PipelineModule
    from zerotrial.engine.protocols import Observer

__all__ = ["Runner"]

_KEPT = 8
"""Schedules for as many shapes are kept; each has buffers for its activations."""

Loss = Callable[[Any, Any], Tensor]


@dataclass
class _Plan:
    """A schedule for micro-batches of one shape."""

    step: Callable[..., Any]
    """Of a schedule."""

    stages: list[ZeroStage]
    sends: int
    """Elements that this rank sends for one micro-batch, forward and backward."""

    moving: list[Tensor]
    """Buffers that a forward changes."""


class Runner:
    """The chunks of this rank.

    Args:
        module: That has them.
        pipe: The ranks of the pipeline.
        device: Of this one.
        schedule: Of the configuration.
    """

    def __init__(
        self, module: PipelineModule, pipe: Axis, device: torch.device, schedule: ScheduleName
    ) -> None:
        self._module = module
        self._pipe = pipe
        self._device = device
        self._name = schedule
        self._total = module.num_stages * module.chunks
        self._recomputes = module.activation_checkpoint_interval > 0
        self._chunks = {place: module.chunk(place) for place in module.own_chunks}
        self._feed = Feed(self._chunks[0]) if 0 in self._chunks else None
        self._plans: dict[tuple[int, int], _Plan] = {}
        # of the batch that runs
        self._labels: list[Any] = []
        self._losses: list[Tensor] = []
        self._loss: Loss | None = None
        self._factor = 1.0
        self._failures: Failures | None = None
        self._before: list[tuple[Tensor, Tensor]] = []
        self.sent = 0
        """Elements that were sent to other stages while training."""

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
            drawn: The micro-batches.
            count: How many.
            stage: Gathers the gradients.
            observer: Of the engine.
            loss: Of an output and its labels.
            factor: What losses are multiplied by before backward.
            failures: Of the batch.

        Returns:
            The losses, on the last stage.
        """
        key = count, drawn.kind
        passes = Passes(stage, observer, failures, count * len(self._chunks))
        plan = self._plans.pop(key, None) or self._make(drawn, count, failures)
        if plan is None:
            passes.skip_all()
            return []
        self._labels, self._losses = drawn.labels, []
        self._loss, self._factor, self._failures = loss, factor, failures
        self._before = [(value, value.clone()) for value in plan.moving]
        for each in plan.stages:
            each.passes = passes
        if self._feed is not None:
            self._feed.inputs = drawn.inputs
        numbers = torch.arange(count)
        last = self._total - 1 in self._chunks
        with observed_transfers(observer):
            plan.step(
                *((numbers,) if self._feed is not None else ()), target=numbers if last else None
            )
        self._plans[key] = plan  # not after an error, which leaves it in the middle
        while len(self._plans) > _KEPT:
            self._plans.pop(next(iter(self._plans)))
        self.sent += count * plan.sends
        found, self._losses, self._labels, self._loss = self._losses, [], [], None
        return found

    def forget_batch(self) -> None:
        """Leave no trace of a batch that failed on some rank; to be called on all."""
        self._plans.clear()  # one that broke off is in the middle; all ranks make a new one
        for value, before in self._before:
            value.copy_(before)

    def _scaled_loss(self, output: Any, number: Tensor) -> Tensor:
        assert self._loss is not None
        assert self._failures is not None
        if not self._failures:
            with self._failures.noting(int(number)):
                loss = self._loss(output, self._labels[int(number)])
                self._losses.append(loss.detach().float())
                return loss * self._factor
        return torch.zeros(())  # no backward follows

    def _make(self, drawn: MicroBatches, count: int, failures: Failures) -> _Plan | None:
        """Find out what chunks pass on; None if that fails on any rank of the pipeline."""
        signatures: dict[int, tuple[Signature | None, Signature]] = {}
        moving: list[Tensor] = []
        self._before = []
        with self._no_trace(moving), torch.enable_grad():
            for place, received, given in self._straight(drawn.inputs[:1], 1, failures):
                with failures.noting(0):
                    got = Signature.of(received[0]) if place else None
                    signatures[place] = got, Signature.of(given)
        with failures.noting(0):
            self._module.check_ties(moving)
        failed = torch.tensor(float(bool(failures)), device=self._device)
        dist.all_reduce(failed, group=self._pipe.group)
        if failed:
            return None
        make_stage = stage_class()
        stages = [
            make_stage(
                chunk if place or self._feed is None else self._feed,
                place,
                self._total,
                self._pipe,
                self._device,
                received=signatures[place][0],
                given=signatures[place][1],
                ends=self._module.end_of(place),
                splits=self._name == "zero-bubble",
                recomputes=self._recomputes,
            )
            for place, chunk in self._chunks.items()
        ]
        sends = 0
        for place, (before, after) in signatures.items():
            sends += 0 if before is None else _numel(before, flowing=True)
            sends += 0 if place == self._total - 1 else _numel(after)
        step = make_schedule(self._name, stages, count, self._scaled_loss)
        return _Plan(step, stages, sends, moving)

    def evaluate(self, drawn: MicroBatches, count: int, failures: Failures) -> list[Any] | None:
        """Run micro-batches forward. **Collective** over the pipeline.

        Args:
            drawn: The micro-batches.
            count: How many.
            failures: Of the batch.

        Returns:
            The outputs, on the last stage.
        """
        last = self._total - 1
        found = [out for at, _, out in self._straight(drawn.inputs, count, failures) if at == last]
        return found if last in self._chunks else None

    def _straight(
        self, inputs: list[tuple[Any, ...]], count: int, failures: Failures
    ) -> Iterator[tuple[int, tuple[Any, ...], Any]]:
        """Run chunk after chunk, each on all micro-batches; sends do not wait for receivers.

        After a failure nothing more is run or yielded, here and on the ranks behind.
        """
        transfer = Transfer(self._pipe, self._device)
        for place, index in self._order(count):
            origin = (self._pipe.rank - 1) % self._pipe.size
            received = inputs[index] if place == 0 else _one(transfer.receive(origin))
            to = (self._pipe.rank + 1) % self._pipe.size
            if received is not None and not failures:
                with failures.noting(index):
                    output = self._chunks[place](*received)
                    if place < self._total - 1:
                        transfer.send(output, to)
                    yield place, received, output
                    continue
            if place < self._total - 1:
                transfer.send_nothing(to)
        transfer.finish()

    def _order(self, count: int) -> list[tuple[int, int]]:
        """Which chunk runs on which micro-batch, one after the other.

        Between two ranks one connection goes both ways, and NCCL does on it what was started first:
        there each micro-batch goes all its way before the next one, so that both ranks start the
        same things in the same order.
        """
        if self._pipe.size == 2:
            return [(place, index) for index in range(count) for place in self._chunks]
        return [(place, index) for place in self._chunks for index in range(count)]

    @contextmanager
    def _no_trace(self, moving: list[Tensor]) -> Iterator[None]:
        """Put random generators and buffers back as they were.

        Args:
            moving: Gets the buffers that were changed.
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


def _one(value: Any) -> tuple[Any] | None:
    """Make what was received the one argument of a chunk; None where nothing was."""
    return None if value is None else (value,)


def _numel(signature: Signature, *, flowing: bool = False) -> int:
    """Count elements; those only that have a gradient, if ``flowing``."""
    parts = signature.parts
    return sum(torch.Size(shape).numel() for shape, _, flows in parts if flows or not flowing)
