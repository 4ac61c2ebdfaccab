"""Engine methods that save, load and export."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import ConfigError, EngineError
from zerotrial.engine.checkpoint.checkpointer import Checkpointer
from zerotrial.engine.checkpoint.export import export_weights
from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.checkpoint.load import Selection
from zerotrial.engine.checkpoint.ranks import CheckpointRanks
from zerotrial.engine.checkpoint.training_state import TrainingState
from zerotrial.engine.comm.watchdog import CollectiveWatchdog, collective
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.module.gradient_access import GradientOwner, close_window, open_window
from zerotrial.engine.progress import Progress
from zerotrial.engine.protocols import Stage
from zerotrial.engine.tensor.model_sharding import ShardedModel

__all__ = ["CheckpointMethods"]

_SIXTEEN_BITS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.bfloat16}


class CheckpointMethods:
    """Mixin of DeepSpeed's checkpoint methods."""

    module: nn.Module
    stage: Stage
    scaler: LossScaler
    lr_scheduler: Any
    training_dataloader: Any
    config: EngineConfig
    progress: Progress
    mesh: Mesh
    divided: ShardedModel
    watchdog: CollectiveWatchdog

    @cached_property
    def checkpointer(self) -> Checkpointer:
        """Checkpointer; its creation at the first use is **Collective**."""
        options = self.config.checkpoint
        return Checkpointer(
            self._training_state(),
            tag_validation=options.tag_validation,
            in_background=options.writer.decoupled,
        )

    def _training_state(self) -> TrainingState:
        local = {p.name: self.divided.shape(p.name, p.shape) for p in self.stage.pieces()}
        # A rank may own no element of a parameter.
        trainable = _union(CheckpointRanks(self.mesh.data.group).allgather(local))
        everywhere = _union(CheckpointRanks(self.mesh.saving.group).allgather(trainable))
        # Of several replicas of a shard the first one is written.
        writes = self.mesh.replicate.rank == 0
        counted = self.mesh.counted_parameters(self.module.parameters()) if writes else frozenset()
        stateful = {
            "counters": self.progress,
            "loss_scaler": self.scaler,
            "lr_scheduler": self.lr_scheduler,
            "loader": self.training_dataloader,
        }
        return TrainingState(
            module=self.module,
            stage=self.stage,
            zero_stage=self.config.zero_optimization.stage,
            trainable=trainable,
            everywhere=everywhere,
            counted=frozenset(
                name
                for name, parameter in self.module.named_parameters()
                if parameter in counted or (writes and name in self.divided.cuts)
            ),
            divided=self.divided,
            mesh=self.mesh,
            progress=self.progress,
            scaler=self.scaler,
            stateful={name: part for name, part in stateful.items() if hasattr(part, "state_dict")},
        )

    @collective
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
        """Write the training state. **Collective**.

        Between two accumulation boundaries it includes the accumulated gradients.

        Args:
            save_dir: Directory with the checkpoints of one engine.
            tag: Folder name; ``global_step<N>`` by default. An older checkpoint with the same
                tag is replaced.
            client_state: State of the user: tensors, numbers, strings and containers of them.
            save_latest: Whether to update ``latest``.
            exclude_frozen_parameters: Leave out frozen parameters.
            async_save: Copy the state and write it in the background; None uses
                ``checkpoint.writer.decoupled``. See :meth:`wait_for_checkpoint`.
            client_sd: ``client_state`` under the name in DeepSpeed's examples.

        Returns:
            Directory of the checkpoint, which an asynchronous save creates later.

        Raises:
            CheckpointError: On all ranks, if it could not be written.
        """
        if client_state is not None and client_sd is not None:
            raise CheckpointError("client_sd: is another name of client_state; give one of the two")
        return self.checkpointer.save(
            _checked_directory("save_dir", save_dir),
            f"global_step{self.progress.global_steps}" if tag is None else str(tag),
            client_sd if client_state is None else client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
            in_background=async_save,
        )

    @collective
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
        """Resume from a checkpoint of any stage and number of ranks. **Collective**.

        Gradients that wait for a boundary are replaced, too. Those of the checkpoint are dropped
        unless optimizer states are loaded: then the next micro-batch begins an accumulation window.
        The loader of ``initialize()`` continues at the next sample, whose position is logged; do
        not skip samples.

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

        Raises:
            CheckpointNotFoundError: If it does not exist; training never silently restarts.
            CheckpointError: On all ranks, if a file is missing or damaged, or does not fit.
        """
        if custom_load_fn is not None:
            msg = "load_checkpoint(custom_load_fn): must be None, since weights come in pieces and "
            msg += "not as one state dict; export() the checkpoint's weights from an engine of the "
            msg += "old model, give them to your function before initialize(), or set single ones "
            raise EngineError(f"{msg}with set_full()")
        selection = Selection(
            optimizer_states=load_optimizer_states,
            lr_scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            strict=load_module_strict,
        )
        tag = None if tag is None else str(tag)
        result = self.checkpointer.load(_checked_directory("load_dir", load_dir), tag, selection)
        owner = cast("GradientOwner", self)
        close_window(owner)
        if self.progress.waiting:  # the checkpoint was saved between two micro-batches
            open_window(owner)
        return result

    @collective
    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous save is valid. **Collective**.

        Raises:
            CheckpointError: On all ranks, if it could not be written.
        """
        if "checkpointer" in vars(self):
            self.checkpointer.wait()

    @collective
    def export(
        self,
        path: str | PathLike[str],
        dtype: torch.dtype | None = None,
        *,
        exclude_frozen_parameters: bool = False,
    ) -> str:
        """Write all weights and buffers to one safetensors file. **Collective**.

        Read it with ``model.load_state_dict(safetensors.torch.load_file(path))``: tied parameters
        are stored under each of their names. Rank 0 needs host memory for the full model.

        Args:
            path: Path of the file, which appears when it is complete.
            dtype: Type of floating-point parameters; None keeps the fp32 master weights. Buffers
                keep their types.
            exclude_frozen_parameters: Leave out frozen parameters.

        Returns:
            The path.

        Raises:
            CheckpointError: On all ranks, if the file cannot be written.
        """
        return export_weights(
            self.module,
            self.stage,
            self.mesh,
            self.divided,
            path,
            dtype=dtype,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )

    @collective
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
        self.export(
            Path(save_dir) / save_filename,
            _SIXTEEN_BITS[self.config.dtype],
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        return True


def _union(shapes: Iterable[Mapping[str, torch.Size]]) -> dict[str, torch.Size]:
    merged: dict[str, torch.Size] = {}
    for part in shapes:
        merged |= part
    return {name: merged[name] for name in sorted(merged)}


def _checked_directory(name: str, directory: str | PathLike[str]) -> str | PathLike[str]:
    """Reject an empty name, which would mean the working directory."""
    if not isinstance(directory, str | PathLike) or not str(directory):
        raise CheckpointError(f"{name}: must be the name of a directory, got {directory!r}")
    return directory
