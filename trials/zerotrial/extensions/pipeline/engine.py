"""Engine of a pipeline: all ranks train a batch in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.errors import EngineError
from zerolab.registry import PARTS
from zerotrial.engine.comm.communicator import Traffic
from zerotrial.engine.engine import Engine, EngineParts, to_device
from zerotrial.engine.flat.stages import FlatStage
from zerotrial.engine.module.precision import DTYPES, cast_inputs
from zerotrial.engine.protocols import COMMUNICATION, Observer
from zerotrial.extensions.pipeline.failure import Failures
from zerotrial.extensions.pipeline.micro_batches import MicroBatches, draw
from zerotrial.extensions.pipeline.module import PipelineModule
from zerotrial.extensions.pipeline.single_stage import SingleStageRunner

if TYPE_CHECKING:
    from zerotrial.engine.flat.gradients import Gradients
    from zerotrial.extensions.pipeline.runner import Runner

__all__ = ["PipelineEngine"]

_ALTERNATIVES = "call train_batch(data_iter), which trains a whole batch, or eval_batch(data_iter)"


class PipelineEngine(Engine):
    """Engine of a :class:`~zerotrial.extensions.pipeline.module.PipelineModule`.

    :meth:`train_batch` replaces forward, backward and step. Every rank calls it, and the
    micro-batches pass through the stages in the order of the configured schedule.
    """

    module: PipelineModule

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        name = self.config.dtype
        self._compute = DTYPES[name] if name != "fp32" else None
        self._runner: Runner | SingleStageRunner = SingleStageRunner(self.module)
        if self.module.num_stages > 1:
            from zerotrial.extensions.pipeline.runner import Runner

            assert isinstance(self.stage, FlatStage)
            self._ties = _TiedGradients(self.stage, self.observer)
            self._runner = Runner(
                self.module, self.mesh.pipe, self.device, self.config.pipeline.schedule
            )

    # -- training -------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on the micro-batches of one optimizer step. **Collective**.

        Args:
            data_iter: Iterator of micro-batches, ``(inputs, labels)``; read by the first and the
                last stage, which must get the same ones. By default the loader of
                ``initialize()``, or in a trial the trial's.

        Returns:
            Mean loss over the whole batch, equal on all ranks.

        Raises:
            StopIteration: On all ranks, if the data ends before the batch is full.
            EngineError: If the data is invalid.
            Exception: Raised by this rank's layers, loss or data. The other ranks raise an
                EngineError that names it. The batch is dropped: weights do not change, and
                training can continue. With ``tensor_parallel`` or ZeRO stage 3, an error of a
                layer or the loss is raised at once and must end the process, because other ranks
                wait for this one.
        """
        self._check_trains("train_batch")
        if data_iter is None and self.module.reads_data:
            data_iter = self._default_batches()
        with self.watchdog.call("train_batch"):
            self._recover()
            steps = self.batch.accumulation_steps
            failures = Failures(self.mesh, "train_batch", gathers=self.stage.gathers)
            with self.observer.phase("input"):
                drawn = self._draw(data_iter, steps - self.progress.ended, failures)
            if self.stage.gathers:
                loss = self._train_gathering(drawn, failures)
            else:
                loss = self._train(drawn, failures)
            self._frozen.check()
            return loss

    def _train_gathering(self, drawn: MicroBatches, failures: Failures) -> Tensor:
        total = torch.zeros((), device=self.device)
        for inputs, labels in zip(drawn.inputs, drawn.labels, strict=True):
            loss = self._loss(Engine.__call__(self, *inputs), labels)
            total += Engine.backward(self, loss).float()
            Engine.step(self)
        return self._mean(total, failures)

    def _train(self, drawn: MicroBatches, failures: Failures) -> Tensor:
        assert isinstance(self.stage, FlatStage)
        count = self.batch.accumulation_steps - self.progress.ended
        share = 1.0 / self.batch.accumulation_steps
        self.progress.broken = True
        losses = self._runner.train(
            drawn,
            count,
            self.stage,
            self.observer,
            self._loss,
            self.scaler.scale * share,
            failures,
        )
        with self.observer.phase(COMMUNICATION):
            loss, failed = self._average(self._sum(losses) * share, failures)
        if failed:
            self._runner.forget_batch()
            self._recover()
            failures.raise_everywhere()
        self.progress.broken = False
        for _ in range(count):
            self.progress.backwards = 1
            self.progress.end_micro_batch()
        self.observer.add_loss(loss)
        self._update({})
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        *,
        return_logits: bool = False,
        compute_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate micro-batches, without gradients. **Collective**.

        Args:
            data_iter: See :meth:`train_batch`; micro-batches may differ in shape.
            return_logits: Return the outputs, too: a list on the last stage, None on others.
            compute_loss: False: return only the outputs.
            num_micro_batches: Number of micro-batches; by default those of a training batch.

        Returns:
            Mean loss over the micro-batches and ranks, equal on all ranks; or the outputs as
            requested. Without a ``loss_fn``, if the last layer returns no scalar, the outputs of
            the micro-batches instead of the loss: a list on the last stage, None on others.

        Raises:
            StopIteration: On all ranks, if the data ends early.
            EngineError: If the data is invalid.
            Exception: See :meth:`train_batch`.
        """
        if self.module.reads_data:
            data_iter = self._data_for_evaluation(data_iter)
        count = num_micro_batches or self.batch.accumulation_steps
        training = self.module.training
        self.module.eval()
        try:
            with self.watchdog.call("eval_batch"), torch.no_grad():
                self._recover()
                failures = Failures(self.mesh, "eval_batch", gathers=self.stage.gathers)
                drawn = self._draw(data_iter, count, failures, ragged=True)
                outputs = self._runner.evaluate(drawn, count, failures)
                losses: list[Tensor] = []
                if compute_loss and self.module.loss_fn is None:
                    compute_loss = self._outputs_are_losses(outputs, failures)
                    if not compute_loss and return_logits:
                        return outputs, outputs
                if outputs is not None and compute_loss:
                    pairs = zip(outputs, drawn.labels, strict=False)  # fewer if failed
                    for index, (output, labels) in enumerate(pairs):
                        with failures.catching(index):
                            losses.append(self._loss(output, labels).float())
                loss = self._mean(self._sum(losses) / count, failures)
                if not compute_loss:
                    return outputs
                return (loss, outputs) if return_logits else loss
        finally:
            self.module.train(training)

    def _outputs_are_losses(self, outputs: list[Any] | None, failures: Failures) -> bool:
        """Return whether the last layer returns a scalar each time. **Collective**.

        Raises:
            Exception: On all ranks, if any of them has failed.
        """
        non_scalars = [o for o in outputs or () if not isinstance(o, Tensor) or o.dim() > 0]
        return not float(
            self._mean(torch.tensor(float(bool(non_scalars)), device=self.device), failures)
        )

    def _draw(
        self, data: Iterator[Any] | None, count: int, failures: Failures, *, ragged: bool = False
    ) -> MicroBatches:
        mesh, device, prepare = self.mesh, self.device, self._prepare
        # Shapes and gradients of activations depend on these.
        state = (
            [parameter.requires_grad for parameter in self.module.parameters()],
            [layer.training for layer in self.module.modules()],
        )
        return draw(
            data, count, mesh, device, prepare, failures=failures, state=state, ragged=ragged
        )

    def _prepare(self, value: Any) -> Any:
        moved = to_device(value, self.device)
        return moved if self._compute is None else cast_inputs(moved, self._compute)

    def _loss(self, output: Any, labels: Any) -> Tensor:
        loss_fn = self.module.loss_fn
        loss = output if loss_fn is None else loss_fn(output, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            actual = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            source = "the last layer (there is no loss_fn)" if loss_fn is None else "loss_fn"
            raise EngineError(f"PipelineModule: {source} must return a scalar tensor, got {actual}")
        return loss.reshape(())

    def _sum(self, losses: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss
        return total

    def _mean(self, total: Tensor, failures: Failures) -> Tensor:
        """Average the last stages' values over the replicas. **Collective**.

        Raises:
            Exception: On all ranks, if any of them has failed.
        """
        mean, failed = self._average(total, failures)
        if failed:
            failures.raise_everywhere()
        return mean

    def _average(self, total: Tensor, failures: Failures) -> tuple[Tensor, bool]:
        """Return the mean over the replicas, and whether any rank failed. **Collective**."""
        ranks = self.mesh.all_ranks
        values = torch.stack([total, torch.full_like(total, float(bool(failures)))])
        if ranks is not None and ranks.size > 1:
            dist.all_reduce(values, group=ranks.group)
            values[0] /= self.mesh.data.size * self.mesh.tensor.size
        return values[0], bool(values[1])

    # -- calls that a pipeline does not support -------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise; use :meth:`train_batch`."""
        self._refuse("engine(batch)")

    def _begin_user_backward(self) -> None:
        """Ignore gradients of a pass outside of :meth:`train_batch`."""

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise; use :meth:`train_batch`."""
        self._refuse("backward()")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise; use :meth:`train_batch`."""
        self._refuse("step()")

    def scale(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise; use :meth:`train_batch`."""
        self._refuse("scale()")

    def no_sync(self) -> NoReturn:
        """Raise; use :meth:`train_batch`."""
        self._refuse("no_sync()")

    def _refuse(self, call: str) -> NoReturn:
        raise EngineError(f"{call}: not supported by a pipeline engine; {_ALTERNATIVES}")

    # -- state ----------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per optimizer step, from the next one on.

        Raises:
            EngineError: If the size is not a multiple of the micro-batches over all ranks, or
                the schedule does not support their number.
        """
        before = self.batch
        super().set_train_batch_size(train_batch_size)
        steps, name = self.batch.accumulation_steps, self.config.pipeline.schedule
        problems = PARTS["pipeline_rules"].schedule_problems(
            name, self.module.num_stages, steps, chunks=self.module.chunks
        )
        if problems and self.module.num_stages > 1:
            self.batch = before
            self.progress.resize(before)
            raise EngineError(f"set_train_batch_size(): {'; '.join(problems)}")

    @property
    def traffic(self) -> dict[str, int]:
        """Elements sent by this rank, by axis: data, pipe and ties (between their owners)."""
        elements = {"data": self.stage.traffic.total, "pipe": 0, "ties": 0}
        if self.module.num_stages > 1:
            elements["pipe"] = self._runner.sent
            elements["ties"] = self._ties.traffic.total
        return elements


class _TiedGradients:
    """Sums gradients of parameters tied over pipeline stages over their owners.

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
