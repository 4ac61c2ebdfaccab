"""Contents of a new checkpoint, collected from the training states of all ranks."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerotrial.engine.checkpoint.accumulated_gradients import gradient_ranges
from zerotrial.engine.checkpoint.common_states import saved_common_states
from zerotrial.engine.checkpoint.files import (
    CheckpointError,
    CheckpointRanks,
    Manifest,
    create_temporary,
)
from zerotrial.engine.checkpoint.save import SaveJob
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

__all__ = ["collect"]


def collect(
    state: TrainingState,
    ranks: CheckpointRanks,
    final: Path,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen: bool,
) -> SaveJob:
    """Return what this rank writes. **Collective**.

    Args:
        state: Training state of the engine.
        ranks: Ranks that save together.
        final: Directory of the new checkpoint.
        client_state: State of the user; rank 0's is saved.
        save_latest: Whether to update ``latest``.
        exclude_frozen: Leave out frozen parameters.

    Raises:
        CheckpointError: On all ranks, if any cannot save.
    """
    window = _agree_on_window(state, ranks)
    _check_directory_is_separate(state, str(final.parent.absolute()))
    objects = _objects(state, ranks, client_state, window)
    module_tensors_ = _module_tensors(state, frozen=not exclude_frozen)
    if window.is_open:
        state.stage.settle_gradients()
    temporary = final
    with ranks.together():
        if ranks.rank == 0:
            temporary = create_temporary(final.parent, final.name)
    return SaveJob(
        ranks=ranks,
        temporary=ranks.broadcast(temporary),
        final=final,
        save_latest=save_latest,
        manifest=_manifest(state, ranks, final.name, exclude_frozen=exclude_frozen),
        tensors=ranges_of(
            (p for p in state.stage.pieces() if p.name in state.counted), state.divided.span
        ),
        gradients=_gradients(state, ranks.rank) if window.is_open else (),
        module_tensors=module_tensors_,
        part=state.mesh.pipe.rank if state.mesh.all_ranks is not None else 0,
        objects=objects,
    )


def _agree_on_window(state: TrainingState, ranks: CheckpointRanks) -> WindowState:
    if state.progress.broken:
        state.drop_window()
    windows = ranks.allgather(state.window())
    if any(window != windows[0] for window in windows):
        positions = [f"{window.ended} + {window.backwards}" for window in windows]
        msg = (
            "save_checkpoint: all ranks must be at the same micro-batch, got steps and "
            f"backwards since the last accumulation boundary, by rank: {', '.join(positions)}"
        )
        raise CheckpointError(msg)
    return windows[0]


def _module_tensors(state: TrainingState, *, frozen: bool) -> list[tuple[str, Tensor]]:
    """Copy buffers and frozen parameters, on the first replica's ranks. **Collective**."""
    mesh = state.mesh
    names = {name for name, _ in state.module.named_parameters()}
    tensors = [
        # Collectives for sharded values, so every rank takes part.
        (name, state.divided.full(name, value))
        for name, value in module_tensors(
            state.module,
            set(state.trainable),
            frozen=frozen,
            originals=state.stage.originals,
        )
        if name not in names or name in state.counted
    ]
    first = mesh.data.rank == 0 and (mesh.all_ranks is None or mesh.tensor.rank == 0)
    return tensors if first else []


def _gradients(state: TrainingState, rank: int) -> Iterator[tuple[str, Tensor]]:
    first = state.mesh.all_ranks is None or state.mesh.tensor.rank == 0
    averages = state.mesh.replicate.rank == 0  # other replicas have equal averages
    pieces = (
        piece
        for piece in state.stage.gradient_pieces()
        if (first or piece.name in state.divided.cuts) and (averages or "share" in piece.tensors)
    )
    return gradient_ranges(pieces, state.share_rank(rank), state.divided.span)


def _check_directory_is_separate(state: TrainingState, directory: str) -> None:
    """Check that no other part of the model is saved to the same directory."""
    if state.mesh.all_ranks is not None:
        return  # all parts are saved together, with the names of one model
    directories = state.mesh.gather_over_model(directory)
    if directories.count(directory) > 1:
        msg = (
            f"save_dir: must be another directory for each part of a model that an mpu spreads "
            f"over ranks, got {directory} for {directories.count(directory)} parts"
        )
        raise CheckpointError(msg)


def _manifest(
    state: TrainingState, ranks: CheckpointRanks, tag: str, *, exclude_frozen: bool
) -> Manifest:
    parameter_names = {name for name, _ in state.module.named_parameters()}
    excluded = parameter_names - set(state.trainable) if exclude_frozen else set()
    all_names = names_by_first(state.module).values()
    tied = {names[0]: names[1:] for names in all_names if len(names) > 1}
    gathered = ranks.allgather((excluded, tied))
    frozen = {name for names, _ in gathered for name in names}
    return Manifest(
        tag=tag,
        stage=state.zero_stage,
        world_size=ranks.size,
        files={},
        shapes={name: list(shape) for name, shape in state.everywhere.items()},
        excluded=sorted(frozen),
        layout=state.mesh.layout,
        tied={first: names for _, of in gathered for first, names in of.items()},
    )


def _objects(
    state: TrainingState,
    ranks: CheckpointRanks,
    client_state: Mapping[str, Any],
    window: WindowState,
) -> dict[str, bytes]:
    """Serialize everything except parameters. **Collective**."""
    buffers = buffers_of(state.module)
    digest = _digest(buffers)
    for axis in (state.mesh.tensor, state.mesh.data):  # the first replica's are saved
        digest = CheckpointRanks(axis.group).broadcast(digest)
    scalars = _merged(ranks.allgather(dict(state.stage.updater.scalars())))
    extra = _merged(ranks.allgather(module_extra_state(state.module)))
    common = saved_common_states(state.stage.optimizer, ranks)
    objects: dict[str, bytes] = {}
    with ranks.together():
        rank_state = {
            "random": get_random_state(),
            "buffers": {} if _digest(buffers) == digest else buffers,
        }
        objects[rank_file(ranks.rank)] = to_bytes("rank state", rank_state)
        states = state.stage.other_states(scalars)
        counted_states = {n: v for n, v in states.items() if n in state.counted}
        if counted_states:
            objects[other_states_file(ranks.rank)] = to_bytes("optimizer states", counted_states)
        if ranks.rank == 0:
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
                    window.to_dict(state.stage.local_to_average) if window.is_open else None
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
