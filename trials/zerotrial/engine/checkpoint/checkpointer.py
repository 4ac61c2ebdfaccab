"""Saving and loading of checkpoints, for any stage and any number of ranks.

:mod:`zerotrial.engine.checkpoint.save` documents the files,
:mod:`zerotrial.engine.checkpoint.load` how they are read, and docs/decisions/001 the reasons.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zerotrial.engine.checkpoint.accumulated_gradients import gradient_ranges
from zerotrial.engine.checkpoint.common_states import saved_common_states
from zerotrial.engine.checkpoint.files import (
    CheckpointError,
    CheckpointRanks,
    Manifest,
    check_tag,
    create_temporary,
)
from zerotrial.engine.checkpoint.load import Loader, Selection, find
from zerotrial.engine.checkpoint.save import BackgroundSave, SaveJob, save_now
from zerotrial.engine.checkpoint.shards import ranges_of
from zerotrial.engine.checkpoint.state import (
    CLIENT_STATE,
    ENGINE_STATE,
    buffers_of,
    get_random_state,
    module_extra_state,
    module_tensors,
    names_by_first,
    other_states_file,
    rank_file,
    to_bytes,
)
from zerotrial.engine.checkpoint.training_state import TrainingState
from zerotrial.engine.progress import WindowState

__all__ = ["Checkpointer"]

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saving and loading of one engine's training state.

    Args:
        state: Training state of the engine.
        tag_validation: Reaction to different tags on the ranks.
        in_background: Whether saves are asynchronous by default.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        tag_validation: Literal["Ignore", "Warn", "Fail"] = "Warn",
        in_background: bool = False,
    ) -> None:
        self._state = state
        self._ranks = CheckpointRanks(state.mesh.saving.group)
        self._tag_validation = tag_validation
        self._in_background = in_background
        self._pending: BackgroundSave | None = None

    def save(
        self,
        directory: str | PathLike[str],
        tag: str,
        client_state: Mapping[str, Any] | None = None,
        *,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        in_background: bool | None = None,
    ) -> str:
        """Write a checkpoint. **Collective**.

        Args:
            directory: Directory with the checkpoints of one engine.
            tag: Folder name; an older checkpoint with the same tag is replaced.
            client_state: State of the user, returned by :meth:`load`; rank 0's is saved.
            save_latest: Whether to update ``latest``.
            exclude_frozen_parameters: Leave out frozen parameters.
            in_background: Return as soon as the state is copied to host memory.

        Returns:
            Directory of the checkpoint, which a background save creates later.

        Raises:
            CheckpointError: On all ranks, if any could not save, or a previous save failed.
        """
        self.wait()
        window = self._agree_on_window()
        tag = self._agree_on(tag)
        self._check_directory_is_separate(str(Path(directory).absolute()))
        objects = self._objects(client_state or {}, window)
        module_tensors_ = self._module_tensors(frozen=not exclude_frozen_parameters)
        if window.is_open:
            self._state.gradients.settle_gradients()
        counted = self._state.counted
        temporary = final = Path(directory) / tag
        with self._ranks.together():
            if self._ranks.rank == 0:
                temporary = create_temporary(final.parent, tag)
        job = SaveJob(
            ranks=self._ranks,
            temporary=self._ranks.broadcast(temporary),
            final=final,
            save_latest=save_latest,
            manifest=self._manifest(tag, exclude_frozen=exclude_frozen_parameters),
            tensors=ranges_of(
                (p for p in self._state.states.pieces() if p.name in counted),
                self._state.divided.span,
            ),
            gradients=self._gradients() if window.is_open else (),
            module_tensors=module_tensors_,
            part=self._state.mesh.pipe.rank if self._state.mesh.all_ranks is not None else 0,
            objects=objects,
        )
        if self._in_background if in_background is None else in_background:
            copied = replace(job, tensors=list(job.tensors), gradients=list(job.gradients))
            self._pending = BackgroundSave(copied)
        else:
            save_now(job)
        return str(final)

    @property
    def is_written(self) -> bool:
        """Whether this rank's part of a background save has finished or failed."""
        return self._pending is None or self._pending.done

    def wait(self) -> None:
        """Wait until a background save is valid. **Collective**.

        Raises:
            CheckpointError: On all ranks, if it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def load(
        self,
        directory: str | PathLike[str],
        tag: str | None = None,
        selection: Selection | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Read a checkpoint, regardless of the stage and ranks that wrote it. **Collective**.

        Nothing is changed unless the checkpoint is complete and fits.

        Args:
            directory: Directory passed to :meth:`save`.
            tag: None means the tag in ``latest``.
            selection: Parts to load; None means everything.

        Returns:
            Directory of the checkpoint, and the client state.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint.
            CheckpointError: On all ranks, if anything is missing, damaged or does not fit.
        """
        self.wait()
        path = Path(directory)
        with self._ranks.together():
            path = find(path, tag)
        path = self._ranks.broadcast(path)
        loader = Loader(path, self._state, self._ranks, selection or Selection())
        return str(path), loader.load()

    def _agree_on(self, tag: str) -> str:
        tags = self._ranks.allgather(tag)
        if len(set(tags)) > 1:
            msg = f"save_checkpoint: all ranks must save under one tag, got {tags}"
            if self._tag_validation == "Fail":
                raise CheckpointError(msg)
            if self._tag_validation == "Warn":
                logger.warning("%s; rank 0's is used", msg)
        return check_tag(tags[0])

    def _agree_on_window(self) -> WindowState:
        if self._state.progress.broken:
            self._state.drop_window()
        windows = self._ranks.allgather(self._state.window())
        if any(window != windows[0] for window in windows):
            positions = [f"{window.ended} + {window.backwards}" for window in windows]
            msg = (
                "save_checkpoint: all ranks must be at the same micro-batch, got steps and "
                f"backwards since the last accumulation boundary, by rank: {', '.join(positions)}"
            )
            raise CheckpointError(msg)
        return windows[0]

    def _module_tensors(self, *, frozen: bool) -> list[tuple[str, Tensor]]:
        """Copy buffers and frozen parameters, on the first replica's ranks. **Collective**."""
        state, mesh = self._state, self._state.mesh
        names = {name for name, _ in state.module.named_parameters()}
        tensors = [
            # Collectives for sharded values, so every rank takes part.
            (name, state.divided.full(name, value))
            for name, value in module_tensors(
                state.module,
                set(state.trainable),
                frozen=frozen,
                originals=state.originals,
            )
            if name not in names or name in state.counted
        ]
        first = mesh.data.rank == 0 and (mesh.all_ranks is None or mesh.tensor.rank == 0)
        return tensors if first else []

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        state = self._state
        first = state.mesh.all_ranks is None or state.mesh.tensor.rank == 0
        averages = state.mesh.replicate.rank == 0  # other replicas have equal averages
        pieces = (
            piece
            for piece in state.gradients.gradient_pieces()
            if (first or piece.name in state.divided.cuts)
            and (averages or "share" in piece.tensors)
        )
        return gradient_ranges(pieces, state.share_rank(self._ranks.rank), state.divided.span)

    def _check_directory_is_separate(self, directory: str) -> None:
        """Check that no other part of the model is saved to the same directory."""
        if self._state.mesh.all_ranks is not None:
            return  # all parts are saved together, with the names of one model
        directories = self._state.mesh.gather_over_model(directory)
        if directories.count(directory) > 1:
            msg = (
                f"save_dir: must be another directory for each part of a model that an mpu spreads "
                f"over ranks, got {directory} for {directories.count(directory)} parts"
            )
            raise CheckpointError(msg)

    def _manifest(self, tag: str, *, exclude_frozen: bool) -> Manifest:
        parameter_names = {name for name, _ in self._state.module.named_parameters()}
        excluded = parameter_names - set(self._state.trainable) if exclude_frozen else set()
        all_names = names_by_first(self._state.module).values()
        tied = {names[0]: names[1:] for names in all_names if len(names) > 1}
        gathered = self._ranks.allgather((excluded, tied))
        frozen = {name for names, _ in gathered for name in names}
        return Manifest(
            tag=tag,
            stage=self._state.zero_stage,
            world_size=self._ranks.size,
            files={},
            shapes={name: list(shape) for name, shape in self._state.everywhere.items()},
            excluded=sorted(frozen),
            layout=self._state.mesh.layout,
            tied={first: names for _, of in gathered for first, names in of.items()},
        )

    def _objects(self, client_state: Mapping[str, Any], window: WindowState) -> dict[str, bytes]:
        """Serialize everything except parameters. **Collective**."""
        state = self._state
        buffers = buffers_of(state.module)
        digest = _digest(buffers)
        for axis in (state.mesh.tensor, state.mesh.data):  # the first replica's are saved
            digest = CheckpointRanks(axis.group).broadcast(digest)
        scalars = _merged(self._ranks.allgather(dict(state.states.scalars())))
        extra = _merged(self._ranks.allgather(module_extra_state(state.module)))
        common = saved_common_states(state.stage.optimizer, self._ranks)
        objects: dict[str, bytes] = {}
        with self._ranks.together():
            rank_state = {
                "random": get_random_state(),
                "buffers": {} if _digest(buffers) == digest else buffers,
            }
            objects[rank_file(self._ranks.rank)] = to_bytes("rank state", rank_state)
            states = state.states.other_states(scalars)
            counted_states = {n: v for n, v in states.items() if n in state.counted}
            if counted_states:
                objects[other_states_file(self._ranks.rank)] = to_bytes(
                    "optimizer states", counted_states
                )
            if self._ranks.rank == 0:
                engine_state = {
                    "optimizer": {
                        "type": type(state.stage.optimizer).__name__,
                        "scalars": scalars,
                        "common": common,
                        "groups": [_options(group) for group in state.stage.optimizer.param_groups],
                    },
                    "module": extra,
                    "parts": {
                        name: {"type": type(part).__name__, "state": part.state_dict()}
                        for name, part in state.stateful.items()
                    },
                    "window": (
                        window.to_dict(state.gradients.local_to_average) if window.is_open else None
                    ),
                }
                objects[ENGINE_STATE] = to_bytes("engine state", engine_state)
                objects[CLIENT_STATE] = to_bytes("client_state", client_state)
        return objects


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the mappings of all ranks; the first rank's value of a key wins."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged = {**part, **merged}
    return merged


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _digest(buffers: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in buffers.items():
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
