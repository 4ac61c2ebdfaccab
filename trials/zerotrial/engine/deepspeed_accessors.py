"""DeepSpeed's getters and setters, of one line each, so that its scripts find them on an engine.

They read what the engine is made of and decide nothing. What trains is in
:mod:`zerotrial.engine.engine`, what saves in :mod:`zerotrial.engine.checkpoint.of_engine`.
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

__all__ = ["DeepSpeedCalls"]


class DeepSpeedCalls:
    """What scripts ask a DeepSpeed engine, answered from the parts of this one."""

    INSTEAD: ClassVar[dict[str, str]] = {
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
    """Attributes of DeepSpeed's engine to what took their place."""

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
        """Samples of one optimizer step, over all ranks."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch on one rank."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.batch.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a micro-batch on a rank, and micro-batches of a step."""
        return self.batch.train, self.batch.micro, self.batch.accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many micro-batches make an optimizer step, from the next boundary on.

        Args:
            train_batch_size: Samples of one optimizer step, over all ranks; a multiple of the
                micro-batch over all ranks.

        Raises:
            EngineError: If it is no such multiple, or while micro-batches wait for a boundary.
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
        """All ranks, those of other parts of the model among them."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def global_rank(self) -> int:
        """This one's place among all ranks."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self.batch.dp_world_size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The data-parallel ranks; None for one process without torch.distributed."""
        return self.mesh.data.group

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """See :attr:`group`."""
        return self.mesh.data.group

    # -- precision and stage --------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.config.bf16.enabled

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by; 1 unless fp16."""
        return self.scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.config.fp16.enabled and self.config.fp16.loss_scale == 0

    def zero_optimization(self) -> bool:
        """Whether anything is sharded: stages 1 to 3."""
        return self.config.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        """0, 1, 2 or 3."""
        return self.config.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: stages 2 and 3."""
        return self.config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded: stage 3."""
        return self.config.zero_optimization.stage >= 3

    # -- what the file says ---------------------------------------------------------------------

    def gradient_clipping(self) -> float:
        """Largest norm of the gradient; 0 is off."""
        return self.config.gradient_clipping

    def prescale_gradients(self) -> bool:
        """Whether gradients are divided by the ranks before they are reduced."""
        return self.config.prescale_gradients

    def steps_per_print(self) -> int | None:
        """Optimizer steps between two lines of progress; None prints none."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the phases of a step are timed."""
        return self.config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Whether the bytes held are printed."""
        return self.config.memory_breakdown

    def optimizer_name(self) -> str | None:
        """As the file names it; None where the user passed the optimizer."""
        return self.config.optimizer.type if self.config.optimizer is not None else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """Its arguments in the file."""
        return self.config.optimizer.params if self.config.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        """As the file names it; None without one."""
        return self.config.scheduler.type if self.config.scheduler is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Its arguments in the file."""
        return self.config.scheduler.params if self.config.scheduler is not None else None

    # -- optimizer ------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one whose ``param_groups`` hold the learning rates."""
        return self.stage.optimizer

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups, until a schedule sets others."""
        set_rates(self.optimizer, [lr] * len(self.optimizer.param_groups))

    def get_mom(self) -> list[Any]:
        """Of each parameter group the betas, or the momentum where it has no betas."""
        groups = self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    # -- the model and the end ------------------------------------------------------------------

    def module_state_dict(self, *, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Parameters and buffers as the module has them; at stage 3 this rank's shards.

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
        """Make a loader of this rank's share of a dataset, as ``initialize`` does.

        Args:
            dataset: With a length and items, or iterable.
            collate_fn: As in ``torch.utils.data.DataLoader``.
        """
        return build_loader(dataset, self.config, self.batch, self.mesh.data.rank, collate_fn)

    def destroy(self) -> None:
        """See :meth:`~zerotrial.engine.engine.Engine.close`."""
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked for is the module's.

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
                raise  # from inside the module's own code
            msg = f"neither the engine nor its module ({kind}) has an attribute {name!r}"
            engine: Any = type(self)
            msg += _hint(engine, name)
            raise AttributeError(msg, name=name, obj=self) from None


@cache
def _hint(engine: Any, name: str) -> str:
    """What took the place of an attribute, or which one was meant; once for each name."""
    if name in engine.INSTEAD:
        return f"; {engine.INSTEAD[name]}"
    return suggest(name, [known for known in dir(engine) if known[0] != "_"])
