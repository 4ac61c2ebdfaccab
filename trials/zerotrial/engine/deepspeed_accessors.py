"""DeepSpeed's getters and setters, so that its scripts work with an engine.

They read the engine's parts. Training is in :mod:`zerotrial.engine.engine`, saving in
:mod:`zerotrial.engine.checkpoint.engine_api`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from zerolab.config.engine.batch import BatchSizes
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import EngineError
from zerolab.schema.section import suggest
from zerotrial.engine.loader import EngineLoader, build_loader
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.lr_schedules.base import set_rates
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.progress import Progress
from zerotrial.engine.protocols import Stage

__all__ = ["DeepSpeedAccessors"]


class DeepSpeedAccessors:
    """Mixin of DeepSpeed's getters and setters."""

    REPLACEMENTS: ClassVar[dict[str, str]] = {
        "allreduce_gradients": "step() averages gradients; call no_sync() to wait with it",
        "coalesce_grad_reduction": "call backward() inside no_sync(), and the last one outside",
        "compile": "set compile.enabled in the engine file",
        "flops_profiler": "set flops_profiler.enabled in the engine file",
        "offload_states": "set zero_optimization.offload_optimizer in the engine file",
        "reload_states": "set zero_optimization.offload_optimizer in the engine file",
        "set_batch_fn": "map it over the iterator that train_batch(data_iter) gets",
        "set_dataiterator": "pass it to train_batch(data_iter)",
        "set_dataloader": "pass the loader's iterator to train_batch(data_iter)",
        "set_train_micro_batch_size": "set train_micro_batch_size_per_gpu in the engine file",
        "tput_timer": "set steps_per_print in the engine file",
        "monitor": "set tensorboard.enabled or csv_monitor.enabled in the engine file",
    }
    """Attributes of DeepSpeed's engine, with their replacements."""

    module: nn.Module
    stage: Stage
    scaler: LossScaler
    config: EngineConfig
    batch: BatchSizes
    progress: Progress
    mesh: Mesh
    close: Callable[[], None]

    # -- sizes and ranks ------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the samples of one optimizer step, over all ranks."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one micro-batch on one rank."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of one optimizer step."""
        return self.batch.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return samples of a step, of a rank's micro-batch, and micro-batches of a step."""
        return self.batch.train, self.batch.micro, self.batch.accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the micro-batches per optimizer step, from the next boundary on.

        Args:
            train_batch_size: Samples of one optimizer step, over all ranks; a multiple of the
                micro-batch over all ranks.

        Raises:
            EngineError: If it is not a multiple, or while micro-batches wait for a boundary.
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

    @property
    def world_size(self) -> int:
        """Number of all ranks, including those of other parts of the model."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.batch.dp_world_size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Data-parallel group; None for one process without torch.distributed."""
        return self.mesh.data.group

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Data-parallel group; the same as :attr:`group`."""
        return self.mesh.data.group

    # -- precision and stage --------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        """Return whether the model computes in fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Return whether the model computes in bfloat16."""
        return self.config.bf16.enabled

    @property
    def loss_scale(self) -> float:
        """Factor of the losses; 1 unless fp16."""
        return self.scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return self.config.fp16.enabled and self.config.fp16.loss_scale == 0

    def zero_optimization(self) -> bool:
        """Return whether anything is sharded: stages 1 to 3."""
        return self.config.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage: 0, 1, 2 or 3."""
        return self.config.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded: stages 2 and 3."""
        return self.config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded: stage 3."""
        return self.config.zero_optimization.stage >= 3

    # -- configuration --------------------------------------------------------------------------

    def gradient_clipping(self) -> float:
        """Return the largest norm of the gradient; 0 disables clipping."""
        return self.config.gradient_clipping

    def prescale_gradients(self) -> bool:
        """Return whether gradients are divided by the ranks before they are reduced."""
        return self.config.prescale_gradients

    def steps_per_print(self) -> int | None:
        """Return the optimizer steps between two progress lines; None prints none."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Return whether the phases of a step are timed."""
        return self.config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Return whether memory is printed."""
        return self.config.memory_breakdown

    def optimizer_name(self) -> str | None:
        """Return the configured optimizer's name; None with a user's optimizer."""
        return self.config.optimizer.type if self.config.optimizer is not None else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the configured optimizer's arguments."""
        return self.config.optimizer.params if self.config.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        """Return the configured schedule's name; None without one."""
        return self.config.scheduler.type if self.config.scheduler is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return the configured schedule's arguments."""
        return self.config.scheduler.params if self.config.scheduler is not None else None

    # -- optimizer ------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer whose ``param_groups`` have the learning rates."""
        return self.stage.optimizer

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups, until a schedule changes it."""
        set_rates(self.optimizer, [lr] * len(self.optimizer.param_groups))

    def get_mom(self) -> list[Any]:
        """Return each parameter group's betas, or its momentum without betas."""
        groups = self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    # -- the model and the end ------------------------------------------------------------------

    def module_state_dict(self, *, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's parameters and buffers; at stage 3 this rank's shards.

        Args:
            exclude_frozen_parameters: Leave out parameters that are not trained.
        """
        state = dict(self.module.state_dict())
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(name, None)
        return state

    def deepspeed_io(
        self, dataset: Any, collate_fn: Callable[[Any], Any] | None = None
    ) -> EngineLoader:
        """Return a loader of this rank's share of a dataset, as ``initialize`` does.

        Args:
            dataset: Dataset with a length and items, or iterable.
            collate_fn: See ``torch.utils.data.DataLoader``.
        """
        return build_loader(dataset, self.config, self.batch, self.mesh.data.rank, collate_fn)

    def destroy(self) -> None:
        """Close the engine, see :meth:`~zerotrial.engine.engine.Engine.close`."""
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module.

        Raises:
            AttributeError: Naming engine and module, if neither has it.
        """
        if name == "module":
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            kind = type(self.module).__name__
            if f"'{kind}' object has no attribute '{name}'" not in str(error):
                raise  # raised inside the module's code
            msg = f"neither the engine nor its module ({kind}) has an attribute {name!r}"
            engine: Any = type(self)
            msg += _hint(engine, name)
            raise AttributeError(msg, name=name, obj=self) from None


@cache
def _hint(engine: Any, name: str) -> str:
    """Return the replacement of an attribute, or a suggestion; cached by name."""
    if name in engine.REPLACEMENTS:
        return f"; {engine.REPLACEMENTS[name]}"
    return suggest(name, [candidate for candidate in dir(engine) if candidate[0] != "_"])
