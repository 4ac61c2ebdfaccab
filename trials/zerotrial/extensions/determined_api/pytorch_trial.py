"""Determined's PyTorchTrial on the training loop of Zerolab.

It trains with torch's DDP and any optimizer; with the hyperparameter ``deepspeed_config``, on the
ZeRO engine.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerolab.errors import TrialError
from zerotrial.context import ZeroTrialContext
from zerotrial.extensions.determined_api.engine_models import EngineModels
from zerotrial.extensions.determined_api.lr_scheduler import LRScheduler
from zerotrial.extensions.determined_api.trial_models import TrialModels
from zerotrial.trainer import init as init_trial
from zerotrial.trial import ZeroTrial

__all__ = ["PyTorchTrial", "PyTorchTrialContext", "init"]


class _Experimental:
    """Determined's ``context.experimental``."""

    def __init__(self, models: TrialModels | EngineModels) -> None:
        self._models = models

    def use_amp(self) -> None:
        """Train with automatic mixed precision: fp16 with a scaler on GPUs, bf16 on CPUs."""
        if isinstance(self._models, EngineModels):
            problem = "use_amp: must not be called with deepspeed_config"
            raise TrialError(f"{problem}; set bf16 or fp16 in the engine file")
        kind = self._models.device.type
        if kind == "cpu":
            self._models.autocast_type = torch.bfloat16
        else:
            self._models.autocast_type = torch.float16
            self._models.scaler = torch.amp.GradScaler(kind)


class PyTorchTrialContext(ZeroTrialContext):
    """Context of a PyTorchTrial.

    The loop makes a :class:`zerotrial.ZeroTrialContext`. :meth:`adopt` gives it the methods of this
    class, so that trial and loop share one object.
    """

    models_of_trial: TrialModels | EngineModels
    experimental: _Experimental
    aggregation_frequency = 1

    @classmethod
    def adopt(cls, context: ZeroTrialContext) -> "PyTorchTrialContext":
        """Make a context that of a PyTorchTrial; a second call changes nothing."""
        if not isinstance(context, cls):
            context.__class__ = cls
        assert isinstance(context, cls)
        if "models_of_trial" not in vars(context):
            models = context.new_models()
            context.models_of_trial = models
            context.experimental = _Experimental(models)
            if isinstance(models, TrialModels):
                context.wrap_model_engine(models)
        return context

    def new_models(self) -> TrialModels | EngineModels:
        """Make the object that holds models and optimizers."""
        hparams = self.get_hparams()
        if "deepspeed_config" in hparams:
            return EngineModels(hparams["deepspeed_config"], self.device)
        size = hparams.get("global_batch_size")
        per_rank = None if size is None else max(1, int(size) // self.distributed.size)
        return TrialModels(self.distributed, self.device, per_rank, self.aggregation_frequency)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model on the device of this rank, whose gradients the ranks average."""
        return self.models_of_trial.add_model(model)

    def wrap_optimizer(self, optimizer: Any, *args: Any, **options: Any) -> Any:
        """Register an optimizer, and return it."""
        del args, options  # settings of Horovod
        models = self.models_of_trial
        if isinstance(models, EngineModels):
            self.wrap_model_engine(models.add_optimizer(optimizer))
        else:
            models.optimizers.append(optimizer)
        return optimizer

    def wrap_lr_scheduler(
        self, lr_scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1
    ) -> Any:
        """Register a schedule, which steps as its mode says, and return it."""
        schedule = LRScheduler(lr_scheduler, step_mode, frequency)
        self.models_of_trial.schedules.append(schedule)
        return lr_scheduler

    def wrap_scaler(self, scaler: Any) -> Any:
        """Register a gradient scaler, so that checkpoints have its state, and return it."""
        if isinstance(self.models_of_trial, EngineModels):
            problem = "wrap_scaler: must not be called with deepspeed_config"
            raise TrialError(f"{problem}; set fp16 in the engine file")
        self.models_of_trial.scaler = scaler
        return scaler

    def backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        """Compute the gradients of a batch; those of several batches are averaged."""
        self.models_of_trial.backward(loss, *args, **options)

    def step_optimizer(
        self,
        optimizer: Any,
        clip_grads: Callable[[Iterator[torch.nn.Parameter]], None] | None = None,
        auto_zero_grads: bool = True,  # noqa: FBT001, FBT002 - Determined's signature
        scaler: Any = None,
        closure: Callable[[], float] | None = None,
    ) -> None:
        """Step an optimizer, in every batch or in every ``aggregation_frequency``-th one.

        Args:
            optimizer: Of :meth:`wrap_optimizer`.
            clip_grads: Called with the parameters before the step.
            auto_zero_grads: Reset the gradients after the step.
            scaler: Gradient scaler with which the loss was scaled.
            closure: Passed to the optimizer.
        """
        models = self.models_of_trial
        if isinstance(models, EngineModels):
            models.step(clip_grads, scaler, closure)
            return
        if not models.updates(self.current_train_batch()):
            return
        own = models.scaler if models.autocast_type is not None else None
        scaling = scaler or own
        if clip_grads is not None:
            if scaling is not None:
                scaling.unscale_(optimizer)
            groups = optimizer.param_groups
            clip_grads(parameter for group in groups for parameter in group["params"])
        if scaling is not None:
            scaling.step(optimizer)
            if scaler is None:  # of use_amp(); other scalers are updated by the trial
                scaling.update()
        elif closure is not None:
            optimizer.step(closure)
        else:
            optimizer.step()
        if auto_zero_grads:
            optimizer.zero_grad()

    def step_schedules(self) -> None:
        """Step the schedules that are due at the end of a batch."""
        models, batch = self.models_of_trial, self.current_train_batch()
        if isinstance(models, EngineModels) and not models.completes_batch():
            return
        done = batch + 1
        for schedule in models.schedules:
            schedule.step_if_due(
                done,
                epoch=self.current_train_epoch() + 1
                if self._epoch_length and self.is_epoch_end()
                else None,
                updates=done // models.aggregation_frequency if models.updates(batch) else None,
            )


class PyTorchTrial(ZeroTrial):
    """Determined's trial with ``train_batch(batch, epoch_idx, batch_idx)``.

    The methods of a derived class are wrapped, so that the loop calls them as those of a
    :class:`zerotrial.ZeroTrial`.
    """

    context: PyTorchTrialContext

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, wrapper in _WRAPPERS.items():
            if name in vars(cls):
                setattr(cls, name, wrapper(vars(cls)[name]))


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: PyTorchTrial, context: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        adopted = PyTorchTrialContext.adopt(context)
        vars(self).setdefault("_trial_context", adopted)
        original(self, adopted, *args, **options)
        models = adopted.models_of_trial
        if not models.models:
            name = type(self).__name__
            raise TrialError(f"{name}.__init__: must wrap a model with context.wrap_model")
        if isinstance(models, EngineModels):
            _ = models.engine

    return __init__


def _train_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_batch(self: PyTorchTrial, data: Any, epoch_idx: int, batch_idx: int) -> Any:
        if vars(self).get("_inside"):  # super().train_batch(batch, ...)
            return original(self, data, epoch_idx, batch_idx)
        context = _context_of(self)
        batch = context.to_device(next(data))
        with _inside(self), context.models_of_trial.training_batch(batch_idx):
            metrics = original(self, batch, epoch_idx, batch_idx)
        context.step_schedules()
        return metrics

    return train_batch


def _evaluate_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    takes_index = original.__code__.co_argcount > 2

    @functools.wraps(original)
    def evaluate_batch(self: PyTorchTrial, data: Any, batch_idx: int = 0) -> Any:
        if vars(self).get("_inside"):
            return original(self, data, batch_idx) if takes_index else original(self, data)
        context = _context_of(self)
        batch = context.to_device(next(data))
        with _inside(self), context.models_of_trial.autocast():
            return original(self, batch, batch_idx) if takes_index else original(self, batch)

    return evaluate_batch


def _build_training_data_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_training_data_loader(self: PyTorchTrial) -> Any:
        loader = original(self)
        models = _context_of(self).models_of_trial
        if models.batch_size is None:
            models.batch_size = getattr(loader, "batch_size", None)
        return loader

    return build_training_data_loader


_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "__init__": _init,
    "train_batch": _train_batch,
    "evaluate_batch": _evaluate_batch,
    "build_training_data_loader": _build_training_data_loader,
}


def _context_of(trial: PyTorchTrial) -> PyTorchTrialContext:
    context: PyTorchTrialContext = vars(trial)["_trial_context"]
    return context


@contextmanager
def _inside(trial: PyTorchTrial) -> Iterator[None]:
    """Mark that a method of the trial runs, so that a call of its base class passes the batch."""
    vars(trial)["_inside"] = True
    try:
        yield
    finally:
        vars(trial)["_inside"] = False


@contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: Any = None,
    aggregation_frequency: int = 1,
    enable_tensorboard_logging: bool = True,
) -> Iterator[PyTorchTrialContext]:
    """Make the context of a trial in a script. **Collective**.

    Args:
        hparams: Hyperparameters outside an experiment.
        exp_conf: Experiment file outside an experiment.
        distributed: Ignored: the ranks come from torchrun's variables.
        aggregation_frequency: Batches whose gradients one optimizer step uses.
        enable_tensorboard_logging: Whether the trial's TensorBoard writer gets reported metrics.

    Yields:
        The context.
    """
    del distributed
    with init_trial(
        hparams=hparams, exp_conf=exp_conf, enable_tensorboard_logging=enable_tensorboard_logging
    ) as context:
        context.__class__ = PyTorchTrialContext
        adopted: Any = context
        adopted.aggregation_frequency = aggregation_frequency
        yield PyTorchTrialContext.adopt(adopted)
