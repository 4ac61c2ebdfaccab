"""The calls of an engine that save, load and export."""

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

__all__ = ["CheckpointCalls"]

_SIXTEEN_BITS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.bfloat16}


class CheckpointCalls:
    """DeepSpeed's calls for checkpoints, on top of the parts that an engine is made of."""

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
        """Saves and loads; made at the first use, which is **Collective**."""
        options = self.config.checkpoint
        return Checkpointer(
            self._training_state(),
            tag_validation=options.tag_validation,
            in_background=options.writer.decoupled,
        )

    def _training_state(self) -> TrainingState:
        own = {p.name: self.divided.shape(p.name, p.shape) for p in self.stage.pieces()}
        # A rank may own no element of some parameter.
        trainable = _union(CheckpointRanks(self.mesh.data.group).allgather(own))
        everywhere = _union(CheckpointRanks(self.mesh.saving.group).allgather(trainable))
        # Of ranks that have the same shards the first writes them.
        writes = self.mesh.replicate.rank == 0
        counts = self.mesh.counted_parameters(self.module.parameters()) if writes else frozenset()
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
                if parameter in counts or (writes and name in self.divided.cuts)
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
        """Write everything that training needs to go on. **Collective**.

        Between two accumulation boundaries the gradients gathered so far are a part of it.

        Args:
            save_dir: Holds the checkpoints of one engine.
            tag: Folder name; ``global_step<N>`` by default. An older one of the same tag is
                replaced.
            client_state: The user's own: tensors, numbers, strings and containers of them.
            save_latest: Whether ``latest`` is to name this checkpoint.
            exclude_frozen_parameters: Leave out parameters that are not trained.
            async_save: Copy the state and write it while training goes on; None does what
                ``checkpoint.writer.decoupled`` says. See :meth:`wait_for_checkpoint`.
            client_sd: ``client_state`` under the name that DeepSpeed's examples give it.

        Returns:
            Where the checkpoint is; when asynchronous, where it will be.

        Raises:
            CheckpointError: On all ranks, if it could not be written.
        """
        if client_state is not None and client_sd is not None:
            raise CheckpointError("client_sd: is another name of client_state; give one of the two")
        return self.checkpointer.save(
            _given("save_dir", save_dir),
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
        """Go on from a checkpoint of any stage and number of ranks. **Collective**.

        Gradients that wait for a boundary are replaced too. Those that the checkpoint has are
        dropped unless optimizer states are loaded: the next micro-batch then begins an
        accumulation window. The loader of ``initialize()`` goes on at the next sample, and the log
        says where that is: nothing is left to skip.

        Args:
            load_dir: As it was passed to :meth:`save_checkpoint`.
            tag: Folder name; the one that ``latest`` names by default.
            load_module_strict: Whether parameters and buffers must have the same names.
            load_optimizer_states: False starts the optimizer afresh.
            load_lr_scheduler_states: False keeps the schedule as it is.
            load_module_only: Only parameters and buffers; counters, random state and all else stay.
            custom_load_fn: DeepSpeed's; must be None, and the message says what to do instead.

        Returns:
            The checkpoint's directory, and the client state that was saved with it.

        Raises:
            CheckpointNotFoundError: If there is none; training never starts afresh silently.
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
        found = self.checkpointer.load(_given("load_dir", load_dir), tag, selection)
        owner = cast("GradientOwner", self)
        close_window(owner)
        if self.progress.waiting:  # the checkpoint was made between two micro-batches
            open_window(owner)
        return found

    @collective
    def wait_for_checkpoint(self) -> None:
        """Return when an asynchronous save is valid. **Collective**.

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

        ``model.load_state_dict(safetensors.torch.load_file(path))`` reads it: tied parameters stand
        there under each of their names. Rank 0 needs host memory for the whole model.

        Args:
            path: Of the file; appears only when it is complete.
            dtype: Of floating-point parameters; None keeps the fp32 master weights. Buffers keep
                their types.
            exclude_frozen_parameters: Leave out parameters that are not trained.

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

        They are in the type that the model computes in; bf16 when that is fp32.

        Args:
            save_dir: Directory of the file.
            save_filename: Must end in ``.safetensors``.
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            True; DeepSpeed's callers look at it.

        Raises:
            ConfigError: At stage 3, if the config does not allow to gather whole weights, or for a
                file name that promises another format.
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
    found: dict[str, torch.Size] = {}
    for part in shapes:
        found |= part
    return {name: found[name] for name in sorted(found)}


def _given(name: str, directory: str | PathLike[str]) -> str | PathLike[str]:
    """Refuse what would silently mean the working directory."""
    if not isinstance(directory, str | PathLike) or not str(directory):
        raise CheckpointError(f"{name}: must be the name of a directory, got {directory!r}")
    return directory
