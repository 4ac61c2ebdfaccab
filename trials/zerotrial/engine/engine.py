"""Engine: forward, backward and step, each of which delegates to a part.

:mod:`zerotrial.engine.builder.build` chooses the parts; nothing here depends on stage or precision.
DeepSpeed's other methods are in :mod:`zerotrial.extensions.deepspeed_api.methods`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakMethod, WeakSet

import torch
from torch import Tensor, nn

from zerolab.config.engine.batch import BatchSizes
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import EngineError
from zerolab.formatting import html_table
from zerotrial.engine.checkpoint.engine_checkpoint import EngineCheckpoint
from zerotrial.engine.comm.call_record import CallRecord
from zerotrial.engine.gradients import EngineGradients
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.lr_schedules.base import required_arguments
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.module.frozen_parameters import FrozenParameters
from zerotrial.engine.module.gradient_access import (
    close_window,
    open_window,
    reaches_leaves,
    serve_gradients,
    watch_outputs,
)
from zerotrial.engine.module.ownership import ModelOwnership
from zerotrial.engine.module.sharded_model import ShardedModel
from zerotrial.engine.progress import Progress
from zerotrial.engine.protocols import ENGINE_PARTS, Observer, Stage, StepResult

if TYPE_CHECKING:
    from zerotrial.extensions.full_weights.weights import FullWeights

__all__ = ["Engine", "EngineParts", "check_loss", "to_device"]

_in_backward: "WeakSet[Engine]" = WeakSet()
"""Engines that are inside a backward pass."""


@dataclass
class EngineParts:
    """Parts of an engine, see :mod:`zerotrial.engine.builder.build`."""

    module: nn.Module
    stage: Stage
    scaler: LossScaler
    lr_scheduler: Any
    training_dataloader: Any
    config: EngineConfig
    batch: BatchSizes
    device: torch.device
    mesh: Mesh
    divided: ShardedModel
    observer: Observer
    ownership: ModelOwnership
    watchdog: CallRecord
    trains: bool = True
    """Whether the engine has an optimizer."""


class Engine:
    """Model in training: call it, :meth:`backward` the loss, :meth:`step`.

    :func:`zerotrial.initialize` makes it. Its parts are attributes: :attr:`checkpoint` saves and
    loads, :attr:`weights` reads and writes full tensors, :attr:`progress` counts. ``initialize``
    adds the methods of extensions, such as DeepSpeed's ``save_checkpoint``.

    Args:
        parts: Parts that ``initialize`` has chosen by stage, precision and offload.

    Example:
        >>> config = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
        >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
        >>> loss = engine(torch.ones(8, 4)).square().mean()
        >>> loss = engine.backward(loss)
        >>> engine.step().updated
        True
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a method that an extension has added."""

    default_data: Iterator[Any] | None = None
    """Micro-batches for calls without an iterator; in a trial those of its loaders."""

    def __init__(self, parts: EngineParts) -> None:
        # parts
        self.module = parts.module
        self.stage = parts.stage
        self.scaler = parts.scaler
        self.lr_scheduler = parts.lr_scheduler
        self.training_dataloader = parts.training_dataloader
        self.observer = parts.observer
        # configuration and ranks
        self.config = parts.config
        self.batch = parts.batch
        self.device = parts.device
        self.mesh = parts.mesh
        self._trains = parts.trains
        self.divided = parts.divided
        self._ownership = parts.ownership
        self._frozen = FrozenParameters(parts.module, parts.ownership.trained_elsewhere)
        # records of collective calls
        self.watchdog = parts.watchdog
        self._forward_call: AbstractContextManager[None] = nullcontext()
        if parts.stage.gathers:
            self._forward_call = self.watchdog.call("forward")
        self._backward_call = self.watchdog.call("backward")
        self._inside_call = self.watchdog.open_call("backward")
        self._step_call = self.watchdog.call("step")
        # state
        managed = parts.config.managed_gradient_accumulation
        self.progress = Progress(parts.batch, managed=managed)
        self._gradients = EngineGradients(parts.stage, parts.scaler, parts.watchdog)
        self.checkpoint = EngineCheckpoint(
            module=parts.module,
            stage=parts.stage,
            scaler=parts.scaler,
            lr_scheduler=parts.lr_scheduler,
            training_dataloader=parts.training_dataloader,
            config=parts.config,
            progress=self.progress,
            mesh=parts.mesh,
            divided=parts.divided,
            watchdog=parts.watchdog,
            gradients=self._gradients,
        )
        self._syncing = True
        # Caller of the current backward pass: the engine's backward() or scale(), or user code.
        self._backward_origin: Literal["engine", "user"] | None = None
        if parts.trains:
            self._stop_serving = serve_gradients(self._gradients, parts.module.parameters())
            parts.stage.on_unexpected_gradient(_weak_callback(self._begin_user_backward))

    def __repr__(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self._summary().items())
        return f"{type(self).__name__}({values})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._summary())

    def _summary(self) -> dict[str, str]:
        """Return the properties that notebooks and logs show."""
        batch, sizes, config = self.batch, self.mesh.layout, self.config
        numel = sum(
            self.divided.shape(name, parameter.shape).numel()
            for name, parameter in self.module.named_parameters()
        )
        layout = [f"{size} {axis}" for axis, size in sizes.items() if size > 1]
        precision = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
        return {
            "ZeRO stage": str(config.zero_optimization.stage),
            "ranks": " x ".join(layout) or "1",
            "train batch size": str(batch.train),
            "micro-batch size": str(batch.micro),
            "accumulation steps": str(batch.accumulation_steps),
            "precision": precision,
            "parameters" if sizes["pipe"] == 1 else "parameters of this stage": f"{numel:,}",
            "optimizer": type(self.optimizer).__name__ if self._trains else "none",
            "device": str(self.device),
        }

    # -- training -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        self._recover()
        with self._forward_call, self.observer.phase("forward"):
            outputs = self.module(*args, **kwargs)
        if not self._trains or not torch.is_grad_enabled():
            return outputs
        watch_outputs(outputs, self._on_output_gradient)
        return outputs

    def backward(
        self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Accumulate the gradients of one micro-batch; an error restarts the window.

        **Collective** at a boundary, and for every micro-batch at stages 2 and 3.

        Args:
            loss: Scalar mean over the micro-batch; it is divided by the accumulation steps and
                multiplied by the loss scale.
            retain_graph: See ``Tensor.backward``.
            scale_wrt_gas: False: the loss is not divided, because the caller has done it.

        Returns:
            The loss divided by the accumulation steps, without gradient.

        Raises:
            EngineError: If the loss is not a scalar, or does not depend on trained parameters; if
                the engine has no optimizer.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> loss = engine.backward(engine(torch.ones(2, 4)).mean())
            >>> result = engine.step()
        """
        self._check_trains("backward")
        check_loss("backward", loss)
        share = loss / self.batch.accumulation_steps if scale_wrt_gas else loss
        self._recover()
        self.observer.add_loss(share.detach())
        with self._backward_call, self.observer.phase("backward"):
            boundary = self._begin_backward()
            try:
                torch.autograd.backward(share * self.scaler.scale, retain_graph=retain_graph)
            finally:
                self._leave_backward()
            self._end_backward(boundary=boundary)
        return share.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss whose ``backward()`` does the work of :meth:`backward`.

        Use it where another library calls ``loss.backward()``.

        Args:
            loss: Scalar mean over the micro-batch.

        Returns:
            The loss times the loss scale. Gradients of its ``backward()`` are divided by the
            accumulation steps.

        Raises:
            EngineError: If the loss is not a scalar, or does not depend on trained parameters.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> engine.scale(engine(torch.ones(2, 4)).mean()).backward()
            >>> engine.step().updated
            True
        """
        self._check_trains("scale")
        check_loss("scale", loss)
        steps = self.batch.accumulation_steps

        def begin(gradient: Tensor) -> Tensor:
            self._begin_inside_backward("engine")
            return gradient / steps

        self.observer.add_loss(loss.detach() / steps)
        scaled = loss * self.scaler.scale
        scaled.register_hook(begin)  # type: ignore[no-untyped-call]
        return scaled

    def _on_output_gradient(self, gradient: Tensor) -> None:
        """Detect a backward pass of user code at the gradient of an output."""
        del gradient
        # torch.autograd.grad() reaches no leaf, e.g. in a gradient penalty.
        if self._backward_origin is None and reaches_leaves(self.stage.leaves()):
            self._begin_user_backward()

    def _begin_user_backward(self) -> None:
        """Begin a backward of user code, unless it is another engine's pass through this model.

        Raises:
            EngineError: With fp16; the window restarts.
        """
        if any(engine._backward_origin == "engine" for engine in _in_backward):  # noqa: SLF001
            return
        self._begin_inside_backward("user")
        if self.config.fp16.enabled:
            msg = "loss.backward(): with fp16 the loss must be multiplied by the loss scale; call "
            raise EngineError(f"{msg}engine.backward(loss), or engine.scale(loss).backward()")

    def _begin_inside_backward(self, origin: Literal["engine", "user"]) -> None:
        """Begin a backward pass from inside of it, and end it when autograd has finished."""
        self._recover()
        self._inside_call.enter()
        boundary = self._begin_backward(origin)

        def end() -> None:
            self._leave_backward()
            self._end_backward(boundary=boundary)
            self._inside_call.leave()

        # Queued twice, to run after the callback that stage 3 queues for the end of backward.
        queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
        queue(lambda: queue(end))

    def _check_trains(self, call: str) -> None:
        if not self._trains:
            msg = f"{call}(): this engine has no optimizer and is for evaluation; set optimizer in "
            raise EngineError(f"{msg}the engine file, or pass optimizer= to initialize()")

    def _begin_backward(self, origin: Literal["engine", "user"] = "engine") -> bool:
        """Begin a backward pass; return whether its gradients may be communicated."""
        close_window(self._gradients)
        self._backward_origin = origin
        _in_backward.add(self)
        boundary = self.progress.at_last_backward and self._syncing
        self.progress.broken = True
        share = 1 / self.batch.accumulation_steps if origin == "user" else 1.0
        self.stage.before_backward(boundary=boundary, share=share)
        return boundary

    def _leave_backward(self) -> None:
        self._backward_origin = None
        _in_backward.discard(self)

    def _end_backward(self, *, boundary: bool) -> None:
        self.stage.after_backward(boundary=boundary)
        self.progress.broken = False
        self.progress.backwards += 1
        open_window(self._gradients)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> StepResult:
        """End a micro-batch and, at an accumulation boundary, update the weights.

        **Collective** at a boundary. A gradient that is not finite is dropped and the step counted
        as skipped, without changes of schedule and weights.

        Args:
            lr_kwargs: Arguments of the schedule's ``step``. ``ReduceLROnPlateau`` is stepped only
                with ``{"metrics": value}``.

        Returns:
            ``updated``: whether the weights changed. ``grad_norm``: L2 norm of the averaged
            gradient before clipping; None between boundaries.

        Raises:
            EngineError: If there was no :meth:`backward`, inside :meth:`no_sync`, or if the engine
                has no optimizer.

        Example:
            >>> config = {"train_batch_size": 4, "gradient_accumulation_steps": 2,
            ...           "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> for _ in range(2):
            ...     loss = engine.backward(engine(torch.ones(2, 4)).mean())
            ...     engine.step().updated
            False
            True
        """
        self._check_trains("step")
        if not self._syncing:
            msg = "step() inside no_sync(): gradients are not averaged there; call it outside"
            raise EngineError(msg)
        if self.progress.broken:
            msg = "step() after a backward() that raised: its gradients are incomplete; continue "
            raise EngineError(f"{msg}with the next micro-batch, which restarts the window")
        if self.progress.backwards == 0:
            msg = "step() without backward(): there is no gradient; call engine.backward(loss), "
            raise EngineError(f"{msg}or loss.backward(), before each engine.step()")
        boundary = self.progress.at_boundary
        self.progress.end_micro_batch()
        if boundary:
            close_window(self._gradients)
            with self._step_call:
                result = self._update(lr_kwargs or {})
            self._frozen.check()
            return result
        return StepResult(updated=False)

    def _update(self, lr_kwargs: dict[str, Any]) -> StepResult:
        with self.observer.phase("step"):
            # The norm is the same number on every rank, and not finite if any gradient on any rank
            # is not. So all ranks skip or apply the step together, without a second collective for
            # an overflow flag. The gradients carry the scale of their backward: it is read before
            # the scaler changes it, and divided out in the same factor that clips, without another
            # pass over memory.
            norm = self.stage.reduce_gradients(self.scaler.scale)
            updated = math.isfinite(norm)
            scale = self.scaler.scale
            self.scaler.update(not updated)
            if updated:
                self.stage.apply(self._clip(norm) / scale)
                schedule = self.lr_scheduler
                # A schedule that needs a metric (ReduceLROnPlateau) is stepped only with one.
                if schedule is not None and required_arguments(schedule) <= lr_kwargs.keys():
                    schedule.step(**lr_kwargs)
            else:
                self.stage.drop_gradients()
        self.progress.pass_boundary(norm, updated=updated)
        result = StepResult(updated=updated, grad_norm=norm)
        self.observer.step_finished(result)
        return result

    def _clip(self, norm: float) -> float:
        limit = self.config.gradient_clipping
        return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - nn.Module's
        """Drop the gradients since the last update; micro-batches keep counting.

        **Collective** if some have been averaged already. :meth:`step` drops gradients itself.

        Args:
            set_to_none: As in ``nn.Module.zero_grad``.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> loss = engine.backward(engine(torch.ones(2, 4)).mean())
            >>> engine.zero_grad()
        """
        close_window(self._gradients)
        self._inside_call.leave()  # if the last pass raised
        self._leave_backward()
        if self.progress.broken or self.progress.waiting:
            with self.watchdog.call("zero_grad"):
                self.stage.cancel_backward()
        self.progress.reset_backwards()
        self.module.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging; the next backward outside averages them.

        Stage 2 averages nevertheless, because it keeps no full gradients.

        Yields:
            Nothing.

        Example:
            >>> config = {"train_batch_size": 4, "gradient_accumulation_steps": 2,
            ...           "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> with engine.no_sync():
            ...     loss = engine.backward(engine(torch.ones(2, 4)).mean())
            >>> result = engine.step()
            >>> loss = engine.backward(engine(torch.ones(2, 4)).mean())
            >>> engine.step().updated
            True
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on the micro-batches of one optimizer step. **Collective**.

        Args:
            data_iter: Iterator of micro-batches; by default the loader of ``initialize()``, or in
                a trial the trial's. The module must return the loss; a tuple or list is passed
                as positional arguments, a dict as keyword arguments.

        Returns:
            Mean loss of this rank's micro-batches: a scalar fp32 tensor.

        Raises:
            EngineError: If there is no data, or the engine has no optimizer.

        Example:
            >>> class Model(torch.nn.Linear):
            ...     def forward(self, x, y):
            ...         return torch.nn.functional.mse_loss(super().forward(x), y)
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=Model(4, 1), config=config)
            >>> loss = engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 1))]))
        """
        if data_iter is None:
            data_iter = self._default_batches()
        total = torch.zeros((), device=self.device)
        for remaining in reversed(range(self.batch.accumulation_steps)):
            with self.observer.phase("input"):
                batch = to_device(next(data_iter), self.device)
            total += self.backward(self._loss_of(batch)).float()
            if self.progress.managed or not remaining:
                self.step()
        return total

    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> Any:
        """Run one micro-batch through the module in evaluation mode, without gradients.

        **Collective** at stage 3 and with model parallelism.

        Args:
            data_iter: Iterator of micro-batches, see :meth:`train_batch`; None uses a trial's
                validation loader during validation.

        Returns:
            Result of the module.

        Raises:
            EngineError: If there is no data.

        Example:
            >>> config = {"train_batch_size": 2}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> engine.eval_batch(iter([torch.ones(2, 4)])).shape
            torch.Size([2, 1])
        """
        data_iter = self._data_for_evaluation(data_iter)
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                return self._loss_of(to_device(next(data_iter), self.device))
        finally:
            self.module.train(training)

    def _loss_of(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return self(**batch)
        return self(*batch) if isinstance(batch, tuple | list) else self(batch)

    def _default_batches(self) -> Iterator[Any]:
        if self.training_dataloader is not None:
            return self.training_dataloader.forever()  # type: ignore[no-any-return]
        if self.default_data is None:
            msg = "train_batch(): pass data_iter, or training_data to initialize()"
            raise EngineError(msg)
        return self.default_data

    def _data_for_evaluation(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        data = self.default_data if data_iter is None else data_iter
        if data is None:
            raise EngineError("eval_batch(): pass data_iter; outside of a trial there is no other")
        return data

    def train(self, mode: bool = True) -> "Engine":  # noqa: FBT001, FBT002 - nn.Module's
        """Set the module to training mode.

        Args:
            mode: False sets evaluation mode.

        Returns:
            The engine.

        Example:
            >>> config = {"train_batch_size": 2}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Dropout(), config=config)
            >>> engine.train().module.training
            True
        """
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """Set the module to evaluation mode.

        Returns:
            The engine.

        Example:
            >>> config = {"train_batch_size": 2}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Dropout(), config=config)
            >>> engine.eval().module.training
            False
        """
        self.module.eval()
        return self

    # -- state ----------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer whose ``param_groups`` have the learning rates."""
        return self.stage.optimizer

    @property
    def weights(self) -> "FullWeights":
        """Full tensors by name, which the extension ``full_weights`` reads, writes and exports."""
        full_weights: FullWeights = ENGINE_PARTS["full_weights"](self)
        return full_weights

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the micro-batches per optimizer step, from the next boundary on.

        Args:
            train_batch_size: Samples of one optimizer step, over all ranks; a multiple of the
                micro-batch over all ranks.

        Raises:
            EngineError: If it is not a multiple, or while micro-batches wait for a boundary.

        Example:
            >>> config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> engine.set_train_batch_size(8)
            >>> engine.batch.accumulation_steps
            4
        """
        unit = self.batch.micro * self.batch.dp_world_size
        if train_batch_size < unit or train_batch_size % unit:
            msg = f"set_train_batch_size(): must be a multiple of {unit} (the micro-batch of "
            raise EngineError(
                f"{msg}{self.batch.micro} on {self.batch.dp_world_size} rank(s)), "
                f"got {train_batch_size}"
            )
        if self.progress.waiting:
            msg = f"{self.progress.waiting} micro-batch(es) wait for the boundary; call it after "
            raise EngineError(f"set_train_batch_size(): {msg}the step() that updates the weights")
        steps = train_batch_size // unit
        self.batch = replace(self.batch, train=train_batch_size, accumulation_steps=steps)
        self.progress.resize(self.batch)

    def _drop_micro_batches(self) -> None:
        """Drop gradients that wait for a boundary; the window restarts. **Collective**."""
        self.zero_grad()
        self.progress.return_to_boundary()

    def _recover(self) -> None:
        """Restart the window after a backward that raised. **Collective** in that case."""
        if self.progress.broken:
            self._drop_micro_batches()

    def close(self, *, give_back: bool = True, replaced: bool = False) -> None:
        """End training: release memory, and restore the model as a plain one.

        **Collective** at stage 3, where each rank gathers the full model.

        Args:
            give_back: False leaves the model sharded and unusable at stage 3, for a model that
                does not fit on one rank, or if not all ranks call it.
            replaced: Whether a later ``initialize()`` takes the model; errors of later calls then
                name it.

        Example:
            >>> model = torch.nn.Linear(4, 1)
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=model, config=config)
            >>> engine.close()
            >>> model(torch.ones(2, 4)).shape
            torch.Size([2, 1])
        """
        if isinstance(self.stage, _ClosedStage):
            return
        by = " by a later initialize() of its model; use the engine that it returned"
        closed = cast("Stage", _ClosedStage(self.optimizer, by if replaced else ""))
        close_window(self._gradients)
        if self._trains:
            self._stop_serving()
        stage, self.stage = self.stage, closed
        self._gradients.stage = self.checkpoint.stage = closed
        with self.watchdog.call("close"):
            stage.close(give_back=give_back)
            if give_back:
                self.divided.undo()
        self.watchdog.close()
        self.observer.close()
        self._ownership.give_back()


class _ClosedStage:
    """Replacement of a closed engine's stage, which raises on every use.

    Args:
        optimizer: The stage's optimizer, whose rates can still be read.
        reason: End of the error's sentence.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        self.optimizer = optimizer
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise EngineError(f"this engine was closed{self._reason}")


def _weak_callback(method: Callable[[], None]) -> Callable[[], None]:
    """Return a callback without a strong reference: a model must not keep its engine alive."""
    reference = WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call


def check_loss(call: str, loss: Any) -> None:
    """Raise if a loss has no gradient, or is not a scalar.

    Args:
        call: Name of the engine's method, for errors.
        loss: The loss.

    Raises:
        EngineError: If it is invalid.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        actual = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        msg = f"{call}(loss): loss must be a scalar tensor, got {actual}; take its mean"
        raise EngineError(msg)
    if not loss.requires_grad:
        msg = f"{call}(loss): the loss does not depend on trained parameters; was it made "
        raise EngineError(f"{msg}under no_grad, detached, or by another model?")


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors nested in tuples, lists and dicts to a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple | list):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return value
