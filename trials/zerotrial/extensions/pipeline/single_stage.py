"""Backward passes of a batch, and the runner of a pipeline with one stage.

Replicas synchronize when gradients are reduced, so a failed rank must take part there, see
:mod:`zerotrial.extensions.pipeline.failure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerotrial.engine.engine import check_loss

if TYPE_CHECKING:
    from zerotrial.engine.flat.stages import FlatStage
    from zerotrial.engine.protocols import Observer
    from zerotrial.extensions.pipeline.failure import Failures
    from zerotrial.extensions.pipeline.micro_batches import MicroBatches
    from zerotrial.extensions.pipeline.module import PipelineModule

__all__ = ["Passes", "SingleStageRunner"]


class Passes:
    """Backward passes of one batch on this rank, with their gradients in the ZeRO stage.

    Args:
        stage: ZeRO stage that accumulates the gradients.
        observer: The engine's observer.
        failures: Failures of the batch.
        expected: Number of passes with gradients of weights; the last one is the boundary.
    """

    def __init__(
        self, stage: FlatStage, observer: Observer, failures: Failures, expected: int
    ) -> None:
        self.observer = observer
        self.failures = failures
        self._stage = stage
        self._remaining = expected

    @contextmanager
    def backward_pass(self, micro_batch: int) -> Iterator[None]:
        """Accumulate the gradients of one backward pass; a failed pass leaves none."""
        self._remaining -= 1
        boundary = self._remaining == 0
        self._stage.before_backward(boundary=boundary)
        yield
        with self.failures.catching(micro_batch):  # a parameter without a gradient may raise
            self._stage.sweep_gradients()
            self._stage.after_backward(boundary=boundary)

    def skip_all(self) -> None:
        """Take part in the remaining reductions, for which the other replicas wait."""
        while self._remaining:
            with self.backward_pass(0):
                pass


class SingleStageRunner:
    """Runner of all layers in order, without a schedule."""

    sent = 0

    def __init__(self, module: PipelineModule) -> None:
        self._module = module
        self._before: list[tuple[Tensor, Tensor]] = []

    def train(  # noqa: PLR0917 - one caller, as Runner.train
        self,
        drawn: MicroBatches,
        count: int,
        stage: FlatStage,
        observer: Observer,
        loss: Callable[[Any, Any], Tensor],
        factor: float,
        failures: Failures,
    ) -> list[Tensor]:
        """Run forward and backward of each micro-batch, see ``Runner.train``. **Collective**."""
        self._before = [(value, value.clone()) for value in self._module.buffers()]
        passes = Passes(stage, observer, failures, count)
        losses: list[Tensor] = []
        for index in range(count):
            loss_value: Tensor | None = None
            if not failures:
                with observer.phase("forward"), failures.catching(index):
                    loss_value = loss(self._module(*drawn.inputs[index]), drawn.labels[index])
            with observer.phase("backward"), passes.backward_pass(index):
                if loss_value is not None:
                    with failures.catching(index):
                        check_loss("train_batch", loss_value)
                        (loss_value * factor).backward()  # type: ignore[no-untyped-call]
                        losses.append(loss_value.detach().float())
        return losses

    def forget_batch(self) -> None:
        """Restore buffers after a batch that failed on any rank."""
        for value, before in self._before:
            value.copy_(before)

    def evaluate(self, drawn: MicroBatches, count: int, failures: Failures) -> list[Any]:
        """Run micro-batches forward until one fails, see ``Runner.evaluate``."""
        outputs: list[Any] = []
        for index in range(count):
            if not failures:
                with failures.catching(index):
                    outputs.append(self._module(*drawn.inputs[index]))
        return outputs
