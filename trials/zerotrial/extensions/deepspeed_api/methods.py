"""Methods and attributes of DeepSpeed's engine, so that its scripts work with ours.

They use the engine's parts. Training is in :mod:`zerotrial.engine.engine`.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache, cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.config.engine.batch import BatchSizes
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import ConfigError, EngineError
from zerolab.schema.section import suggest
from zerotrial.engine.checkpoint.engine_checkpoint import EngineCheckpoint
from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.lr_schedules.base import set_rates
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.progress import Progress
from zerotrial.engine.protocols import TrainingStage
from zerotrial.extensions.full_weights.weights import FullWeights
from zerotrial.extensions.training_loader import EngineLoader, build_loader

if TYPE_CHECKING:
    from zerotrial.extensions.pipeline.grid import Grid

__all__ = ["DeepSpeedMethods", "PipelineMethods"]

_SIXTEEN_BITS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.bfloat16}


class DeepSpeedMethods:
    """Mixin of DeepSpeed's methods that the engine itself does not need.

    Unknown attributes are the module's, so that an engine can replace the model.
    """

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
    stage: TrainingStage
    scaler: LossScaler
    config: EngineConfig
    batch: BatchSizes
    progress: Progress
    mesh: Mesh
    checkpoint: EngineCheckpoint
    close: Callable[[], None]
    _drop_micro_batches: Callable[[], None]
    if TYPE_CHECKING:

        @property
        def weights(self) -> FullWeights:
            """Return the full tensors."""
            ...

    # -- training ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, as a call of the engine."""
        return self(*args, **kwargs)  # type: ignore[operator]

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next :meth:`step` updates the weights."""
        return self.progress.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:  # noqa: FBT001
        """Set whether the next :meth:`step` is a boundary; None returns to counting.

        Raises:
            EngineError: If every :meth:`step` is a boundary.
        """
        if not self.progress.managed:
            msg = "set_gradient_accumulation_boundary(): managed_gradient_accumulation must be true"
            raise EngineError(f"{msg}, got false; each step() is a boundary: call it only there")
        self.progress.manual_boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Return whether the last :meth:`step` changed the weights."""
        return self.progress.updated

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the full averaged gradient at the last update, before clipping.

        Skipped boundaries (non-finite gradients) do not change it. None before the first
        update.
        """
        return self.progress.grad_norm

    @property
    def global_steps(self) -> int:
        """Accumulation boundaries passed, skipped steps included."""
        return self.progress.global_steps

    @property
    def micro_steps(self) -> int:
        """Micro-batches that :meth:`step` has completed."""
        return self.progress.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Boundaries with a non-finite gradient."""
        return self.progress.skipped_steps

    @property
    def global_samples(self) -> int:
        """Samples of all boundaries passed, over all ranks."""
        return self.progress.global_samples

    def drop_micro_batches(self) -> None:
        """Drop gradients that wait for a boundary; the window restarts. **Collective**."""
        self._drop_micro_batches()

    # -- checkpoints and full weights -----------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's order
        exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's order
        *,
        async_save: bool | None = None,
        client_sd: dict[str, Any] | None = None,
    ) -> str:
        """Write the training state, see :meth:`EngineCheckpoint.save`. **Collective**.

        Args:
            save_dir: Directory with the checkpoints of one engine.
            tag: Folder name; ``global_step<N>`` by default.
            client_state: State of the user: tensors, numbers, strings and containers of them.
            save_latest: Whether to update ``latest``.
            exclude_frozen_parameters: Leave out frozen parameters.
            async_save: Copy the state and write it in the background; see
                :meth:`wait_for_checkpoint`.
            client_sd: ``client_state`` under the name in DeepSpeed's examples.
        """
        if client_state is not None and client_sd is not None:
            raise CheckpointError("client_sd: is another name of client_state; give one of the two")
        return self.checkpoint.save(
            save_dir,
            tag,
            client_sd if client_state is None else client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
            async_save=async_save,
        )

    def load_checkpoint(  # noqa: PLR0917 - DeepSpeed's signature
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's order
        load_optimizer_states: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's order
        load_lr_scheduler_states: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's order
        load_module_only: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's order
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Resume from a checkpoint, see :meth:`EngineCheckpoint.load`. **Collective**.

        Args:
            load_dir: Directory passed to :meth:`save_checkpoint`.
            tag: Folder name; the tag in ``latest`` by default.
            load_module_strict: Whether parameters and buffers must have the same names.
            load_optimizer_states: False resets the optimizer.
            load_lr_scheduler_states: False keeps the current schedule.
            load_module_only: Load only parameters and buffers.
            custom_load_fn: Not supported; the error names the alternative.

        Returns:
            Directory of the checkpoint, and its client state.
        """
        if custom_load_fn is not None:
            msg = "load_checkpoint(custom_load_fn): must be None, since weights come in pieces and "
            msg += "not as one state dict; export() the checkpoint's weights from an engine of the "
            msg += "old model, give them to your function before initialize(), or set single ones "
            raise EngineError(f"{msg}with set_full()")
        return self.checkpoint.load(
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
        )

    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous save is valid. **Collective**."""
        self.checkpoint.wait()

    def export(
        self,
        path: str | PathLike[str],
        dtype: torch.dtype | None = None,
        *,
        exclude_frozen_parameters: bool = False,
    ) -> str:
        """Write full weights, see :meth:`FullWeights.export`. **Collective**."""
        return self.weights.export(path, dtype, exclude_frozen_parameters=exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str | PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's order
    ) -> bool:
        """Write the weights in 16 bits to one safetensors file. **Collective**.

        They have the compute type; bf16 if that is fp32.

        Args:
            save_dir: Directory of the file.
            save_filename: Must end in ``.safetensors``.
            exclude_frozen_parameters: Leave out frozen parameters.

        Returns:
            True, which DeepSpeed's callers check.

        Raises:
            ConfigError: At stage 3, if the config does not permit gathering full weights, or for a
                file name with another format's extension.
            CheckpointError: On all ranks, if the file cannot be written.
        """
        zero = self.config.zero_optimization
        problems = []
        if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
            problems.append(
                "zero_optimization.stage3_gather_16bit_weights_on_model_save: must be true for "
                "save_16bit_model() at stage 3, since it gathers the whole model on rank 0"
            )
        if not save_filename.endswith(".safetensors"):
            problems.append(f"save_filename: must end in .safetensors, got {save_filename!r}")
        if problems:
            raise ConfigError("save_16bit_model()", problems)
        self.weights.export(
            Path(save_dir) / save_filename,
            _SIXTEEN_BITS[self.config.dtype],
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        return True

    def full(self, name: str, kind: str = "weight") -> Tensor | None:
        """Return one full tensor on every rank, see :meth:`FullWeights.full`. **Collective**."""
        return self.weights.full(name, kind)

    def set_full(self, name: str, value: Tensor, kind: str = "weight") -> None:
        """Write one full tensor, see :meth:`FullWeights.set_full`. **Collective**."""
        self.weights.set_full(name, value, kind)

    def gathered(
        self, names: Iterable[str], *, modifier_rank: int | None = None
    ) -> AbstractContextManager[None]:
        """Have full parameters in a block, see :meth:`FullWeights.gathered`. **Collective**."""
        return self.weights.gathered(names, modifier_rank=modifier_rank)

    def full_state_dict(
        self, dtype: torch.dtype | None = None, *, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """Gather weights on rank 0, see :meth:`FullWeights.full_state_dict`. **Collective**."""
        return self.weights.full_state_dict(
            dtype, exclude_frozen_parameters=exclude_frozen_parameters
        )

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

    @property
    def world_size(self) -> int:
        """Number of all ranks, including those of other parts of the model."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

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

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.stage.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups, until a schedule changes it."""
        set_rates(self.stage.optimizer, [lr] * len(self.stage.optimizer.param_groups))

    def get_mom(self) -> list[Any]:
        """Return each parameter group's betas, or its momentum without betas."""
        groups = self.stage.optimizer.param_groups
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
        return build_loader(dataset, self.config, self.batch, self.mesh.replica, collate_fn)

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


class PipelineMethods:
    """Mixin of DeepSpeed's names for stages and ranks of a pipeline."""

    engine: ClassVar[str] = "PipelineEngine"
    is_pipe_parallel = True

    module: Any
    mesh: Mesh

    @cached_property
    def grid(self) -> "Grid":
        """Ranks by pipeline stage and replica."""
        from zerotrial.extensions.pipeline.grid import Grid  # not needed by other engines

        return Grid(self.mesh)

    @property
    def mpu(self) -> "Grid":
        """Grid of the ranks, under DeepSpeed's other name."""
        return self.grid

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.module.num_stages)

    @property
    def stage_id(self) -> int:
        """Pipeline stage of this rank."""
        return int(self.module.stage_id)

    def is_first_stage(self) -> bool:
        """Return whether this rank has the first stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank has the last stage."""
        return self.stage_id == self.num_stages - 1
