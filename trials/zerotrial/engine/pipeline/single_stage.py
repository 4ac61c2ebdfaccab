"""The backward passes of a batch, and a pipeline of one stage, whose rank makes them by itself.

Replicas meet where gradients travel, so that a rank which has failed must come there too, as
:mod:`zerotrial.engine.pipeline.failure` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerotrial.engine.engine import check_loss

if TYPE_CHECKING:
    from zerotrial.engine.flat.stages import FlatStage
    from zerotrial.engine.pipeline.failure import Failures
    from zerotrial.engine.pipeline.micro_batches import MicroBatches
    from zerotrial.engine.pipeline.module import PipelineModule
    from zerotrial.engine.protocols import Observer

__all__ = ["Alone", "Passes"]


class Passes:
    """The backward passes of one batch on this rank, which end in the ZeRO stage.

    Args:
        stage: Gathers the gradients.
        observer: Of the engine.
        failures: Of the batch.
        expected: Passes that make gradients of weights; the last one is the boundary.
    """

    def __init__(
        self, stage: FlatStage, observer: Observer, failures: Failures, expected: int
    ) -> None:
        self.observer = observer
        self.failures = failures
        self._stage = stage
        self._left = expected

    @contextmanager
    def one(self, micro_batch: int) -> Iterator[None]:
        """Gather what one backward pass makes; of one that fails, nothing is kept."""
        self._left -= 1
        boundary = self._left == 0
        self._stage.before_backward(boundary=boundary)
        yield
        with self.failures.noting(micro_batch):  # a parameter without a gradient may be refused
            self._stage.sweep_gradients()
            self._stage.after_backward(boundary=boundary)

    def skip_all(self) -> None:
        """Let the other replicas, which wait for this one's gradients, come to their end."""
        while self._left:
            with self.one(0):
                pass


class Alone:
    """Runs all layers straight through, in place of a ``Runner``, which has a schedule.

    Args:
        module: With all layers.
    """

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
        """Run forward and backward of each micro-batch; see ``Runner.train``. **Collective**."""
        self._before = [(value, value.clone()) for value in self._module.buffers()]
        passes = Passes(stage, observer, failures, count)
        losses: list[Tensor] = []
        for index in range(count):
            made: Tensor | None = None
            if not failures:
                with observer.phase("forward"), failures.noting(index):
                    made = loss(self._module(*drawn.inputs[index]), drawn.labels[index])
            with observer.phase("backward"), passes.one(index):
                if made is not None:
                    with failures.noting(index):
                        check_loss("train_batch", made)
                        (made * factor).backward()  # type: ignore[no-untyped-call]
                        losses.append(made.detach().float())
        return losses

    def forget_batch(self) -> None:
        """Put buffers back as they were before a batch that failed on some rank."""
        for value, before in self._before:
            value.copy_(before)

    def evaluate(self, drawn: MicroBatches, count: int, failures: Failures) -> list[Any]:
        """Run micro-batches forward, up to one that fails; see ``Runner.evaluate``."""
        found: list[Any] = []
        for index in range(count):
            if not failures:
                with failures.noting(index):
                    found.append(self._module(*drawn.inputs[index]))
        return found
