"""Checkpoints of an engine: save and load, for any stage and any number of ranks.

:mod:`zerotrial.engine.checkpoint.save` documents the files,
:mod:`zerotrial.engine.checkpoint.load` how they are read, and docs/contribute/decisions/001 why.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Size, nn

from zerolab.config.engine.engine_config import EngineConfig
from zerotrial.engine.checkpoint.contents import collect
from zerotrial.engine.checkpoint.files import CheckpointError, CheckpointRanks, check_tag
from zerotrial.engine.checkpoint.load import Loader, Selection, find
from zerotrial.engine.checkpoint.save import BackgroundSave, save_now
from zerotrial.engine.checkpoint.training_state import TrainingState
from zerotrial.engine.comm.call_record import CallRecord, collective
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.module.gradient_access import GradientOwner, close_window, open_window
from zerotrial.engine.module.sharded_model import ShardedModel
from zerotrial.engine.progress import Progress
from zerotrial.engine.protocols import Stage

__all__ = ["EngineCheckpoint"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class EngineCheckpoint:
    """Saves and loads the training state of one engine: ``engine.checkpoint``.

    Example:
        >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
        >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
        >>> path = engine.checkpoint.save("checkpoints", "first")
        >>> path, client_state = engine.checkpoint.load("checkpoints", "first")
        >>> path
        'checkpoints/first'
    """

    module: nn.Module
    stage: Stage
    scaler: LossScaler
    lr_scheduler: Any
    training_dataloader: Any
    config: EngineConfig
    progress: Progress
    mesh: Mesh
    divided: ShardedModel
    watchdog: CallRecord
    gradients: GradientOwner
    """Access to ``parameter.grad``, which a load opens or closes."""

    _pending: BackgroundSave | None = None

    @property
    def is_written(self) -> bool:
        """Whether :meth:`wait` would not have to wait for this rank."""
        return self._pending is None or self._pending.done

    @cached_property
    def _ranks(self) -> CheckpointRanks:
        return CheckpointRanks(self.mesh.saving.group)

    @cached_property
    def _state(self) -> TrainingState:
        """Training state of the engine; its creation at the first use is **Collective**."""
        local = {p.name: self.divided.shape(p.name, p.shape) for p in self.stage.pieces()}
        # A rank may own no element of a parameter.
        trainable = _union(CheckpointRanks(self.mesh.data.group).allgather(local))
        everywhere = _union(self._ranks.allgather(trainable))
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

    @collective("save_checkpoint")
    def save(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        async_save: bool | None = None,
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
                ``checkpoint.writer.decoupled``. See :meth:`wait`.

        Returns:
            Directory of the checkpoint, which an asynchronous save creates later.

        Raises:
            CheckpointError: On all ranks, if it could not be written.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> engine.checkpoint.save("checkpoints", client_state={"epoch": 3})
            'checkpoints/global_step0'
        """
        self._wait()
        directory = _checked_directory("save_dir", save_dir)
        tag = f"global_step{self.progress.global_steps}" if tag is None else str(tag)
        job = collect(
            self._state,
            self._ranks,
            Path(directory) / self._agree_on(tag),
            client_state or {},
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )
        if self.config.checkpoint.writer.decoupled if async_save is None else async_save:
            copied = replace(job, tensors=list(job.tensors), gradients=list(job.gradients))
            self._pending = BackgroundSave(copied)
        else:
            save_now(job)
        return str(job.final)

    def _agree_on(self, tag: str) -> str:
        tags = self._ranks.allgather(tag)
        if len(set(tags)) > 1:
            msg = f"save_checkpoint: all ranks must save under one tag, got {tags}"
            validation = self.config.checkpoint.tag_validation
            if validation == "Fail":
                raise CheckpointError(msg)
            if validation == "Warn":
                logger.warning("%s; rank 0's is used", msg)
        return check_tag(tags[0])

    @collective("load_checkpoint")
    def load(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        *,
        strict: bool = True,
        optimizer_states: bool = True,
        lr_scheduler_states: bool = True,
        module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Resume from a checkpoint of any stage and number of ranks. **Collective**.

        Gradients that wait for a boundary are replaced, too. Those of the checkpoint are dropped
        unless optimizer states are loaded: then the next micro-batch begins an accumulation window.
        The loader of ``initialize()`` continues at the next sample, whose position is logged; do
        not skip samples.

        Args:
            load_dir: Directory passed to :meth:`save`.
            tag: Folder name; the tag in ``latest`` by default.
            strict: Whether parameters and buffers must have the same names.
            optimizer_states: False resets the optimizer.
            lr_scheduler_states: False keeps the current schedule.
            module_only: Load only parameters and buffers.

        Returns:
            Directory of the checkpoint, and its client state.

        Raises:
            CheckpointNotFoundError: If it does not exist; training never silently restarts.
            CheckpointError: On all ranks, if a file is missing or damaged, or does not fit.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> path = engine.checkpoint.save("checkpoints", client_state={"epoch": 3})
            >>> path, client_state = engine.checkpoint.load("checkpoints")
            >>> client_state
            {'epoch': 3}
        """
        selection = Selection(
            optimizer_states=optimizer_states,
            lr_scheduler=lr_scheduler_states,
            module_only=module_only,
            strict=strict,
        )
        self._wait()
        path = Path(_checked_directory("load_dir", load_dir))
        with self._ranks.together():
            path = find(path, None if tag is None else str(tag))
        path = self._ranks.broadcast(path)
        client_state = Loader(path, self._state, self._ranks, selection).load()
        close_window(self.gradients)
        if self.progress.waiting:  # the checkpoint was saved between two micro-batches
            open_window(self.gradients)
        return str(path), client_state

    @collective("wait_for_checkpoint")
    def wait(self) -> None:
        """Wait until an asynchronous save is valid. **Collective**.

        Raises:
            CheckpointError: On all ranks, if it could not be written.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> path = engine.checkpoint.save("checkpoints", async_save=True)
            >>> engine.checkpoint.wait()
        """
        self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


def _union(shapes: Iterable[Mapping[str, Size]]) -> dict[str, Size]:
    merged: dict[str, Size] = {}
    for part in shapes:
        merged |= part
    return {name: merged[name] for name in sorted(merged)}


def _checked_directory(name: str, directory: str | PathLike[str]) -> str | PathLike[str]:
    """Reject an empty name, which would mean the working directory."""
    if not isinstance(directory, str | PathLike) or not str(directory):
        raise CheckpointError(f"{name}: must be the name of a directory, got {directory!r}")
    return directory
