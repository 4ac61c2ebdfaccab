"""Loading: checks everything before any change; each rank reads only its part."""

import logging
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerolab.formatting import first_few
from zerotrial.engine.checkpoint.accumulated_gradients import SavedGradients
from zerotrial.engine.checkpoint.common_states import set_saved_common_states
from zerotrial.engine.checkpoint.files import (
    LATEST,
    MANIFEST,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointRanks,
    Manifest,
    check_tag,
    hash_file,
    read_latest,
)
from zerotrial.engine.checkpoint.shards import ShardReader, read_tensors
from zerotrial.engine.checkpoint.state import (
    CLIENT_STATE,
    ENGINE_STATE,
    from_file,
    module_targets,
    rank_file,
    set_module_extra_state,
    set_module_tensor,
    set_random_state,
)
from zerotrial.engine.checkpoint.training_state import TrainingState
from zerotrial.engine.lr_schedules import LRSchedule
from zerotrial.engine.module.compilation import strip_compiled
from zerotrial.engine.module.shard_spec import Span
from zerotrial.engine.update.checkpoint_support import takes_any_states

__all__ = ["Loader", "Selection", "find"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """Parts of a checkpoint to load."""

    optimizer_states: bool = True
    lr_scheduler: bool = True
    module_only: bool = False
    strict: bool = True
    """Whether names of checkpoint and model must agree."""

    @property
    def with_states(self) -> bool:
        """Whether to load optimizer states."""
        return self.optimizer_states and not self.module_only


def find(directory: Path, tag: str | None) -> Path:
    """Return the directory of a checkpoint.

    Args:
        directory: Directory passed to ``save_checkpoint``.
        tag: None means the tag in ``latest``.

    Raises:
        CheckpointNotFoundError: If it does not exist.
        CheckpointError: If ``latest`` is damaged, or the tag is no folder name.
    """
    _refuse_deepspeed(directory, tag)
    path = directory / (read_latest(directory) if tag is None else check_tag(tag))
    if path.is_dir():
        return path
    existing = sorted(item.name for item in directory.iterdir()) if directory.is_dir() else []
    origin = "from latest" if tag is None else "the requested tag"
    shown = f"there are: {', '.join(existing)}" if existing else f"{directory} is empty or missing"
    msg = f"{path}: no such checkpoint ({origin}); {shown}"
    raise CheckpointNotFoundError(msg)


_MAX_PROBLEMS, _MAX_NAMES = 8, 8
"""Limits of one message: with a wrong model every tensor may be a problem."""

_HASHERS = 2
"""Number of files that a rank hashes at the same time."""

_IMPLEMENTATION_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Optimizer options that affect the implementation, not the result."""


@dataclass(frozen=True)
class _ReadRequest:
    """Range of one parameter that this rank needs."""

    name: str
    shape: list[int]
    start: int
    stop: int
    kinds: frozenset[str]
    span: Span | None = None
    """Part of it that the rank has, to which start and stop refer; None: the full parameter."""


def _refuse_deepspeed(directory: Path, tag: str | None) -> None:
    latest = directory / LATEST
    name = tag or (latest.read_text(errors="replace").strip() if latest.is_file() else "")
    path = directory / name
    if name and not (path / MANIFEST).exists() and any(path.glob("*_model_states.pt")):
        msg = (
            f"{path}: was saved by DeepSpeed; make it one of ours with "
            "zerotrial.engine.checkpoint.deepspeed.convert.import_deepspeed(source, destination)"
        )
        raise CheckpointError(msg)


class Loader:
    """Reader of one checkpoint into an engine's training state."""

    def __init__(
        self, path: Path, state: TrainingState, ranks: CheckpointRanks, selection: Selection
    ) -> None:
        self._path = path
        self._state = state
        self._ranks = ranks
        self._selection = selection

    def load(self) -> dict[str, Any]:
        """Check everything, then read it. **Collective**.

        Returns:
            The client state.

        Raises:
            CheckpointError: On all ranks. The state is unchanged, unless the storage failed between
                the check and the reading.
        """
        with ExitStack() as stack:
            with self._ranks.together():
                manifest = Manifest.read(self._path)
                self._verify(manifest)
                files = [self._path / name for name in sorted(manifest.files)]
                reader = stack.enter_context(
                    ShardReader(path for path in files if path.match("rank-*.safetensors"))
                )
                module_tensors = read_tensors(
                    path for path in files if path.name.startswith("module-")
                )
                engine_state = from_file(self._path / ENGINE_STATE)
                client_state: dict[str, Any] = from_file(self._path / CLIENT_STATE)
                rank_state = self._rank_state(manifest)
                gradients = self._gradients(manifest, engine_state, stack)
                other_states = self._other_states(manifest)
                self._prepare(reader, other_states or engine_state["optimizer"]["scalars"])
                plan = self._plan()
            kinds = set().union(
                *self._ranks.allgather({k for request in plan for k in request.kinds})
            )
            model = set().union(*self._ranks.allgather(self._state.model_names()))
            keeps_others = any(self._ranks.allgather(bool(self._state.stage.other_states({}))))
            keeps_others |= self._accepts_any_states(engine_state)
            with self._ranks.together():
                problems = self._tensor_problems(
                    manifest, reader, module_tensors, engine_state, model
                )
                problems += self._read_problems(plan, kinds, manifest, reader)
                needed = {name for states in other_states.values() for name in states}
                needed |= {str(key) for key in self._common(engine_state)}
                if needed and not keeps_others:
                    problems.append(
                        f"optimizer: must keep {_state_list(needed)} of full parameters, as in the "
                        "checkpoint; load_optimizer_states=False resets it"
                    )
                self._raise_problems(problems)
                self._check_window(gradients, manifest)
            self._state.drop_window()
            with self._ranks.together():
                self._fill(manifest, reader, module_tensors)
                module_values = {
                    **self._frozen_since(manifest, reader),
                    **module_tensors,
                    **rank_state.get("buffers", {}),
                }
            self._set_module(module_values)
            self._set_parts(engine_state, other_states)
            if gradients is not None:
                with self._ranks.together():
                    self._resume_window(gradients)
        self._state.stage.weights_changed()
        if "random" in rank_state and not self._selection.module_only:
            set_random_state(
                rank_state["random"]
            )  # last, because earlier steps may have drawn numbers
        return client_state

    # -- checks ---------------------------------------------------------------------------------

    def _verify(self, manifest: Manifest) -> None:
        """Compare sizes and hashes with the manifest; the ranks divide the files."""
        own = []
        for index, (name, expected) in enumerate(sorted(manifest.files.items())):
            file = self._path / name
            if not file.is_file():
                msg = f"{file}: missing; the manifest of the checkpoint lists it"
                raise CheckpointError(msg)
            if (size := file.stat().st_size) != expected.size:
                msg = f"{file}: damaged (must have {expected.size:,} bytes, got {size:,})"
                raise CheckpointError(msg)
            if index % self._ranks.size == self._ranks.rank:
                own.append((file, expected))
        pool = ThreadPoolExecutor(_HASHERS)
        try:
            found = pool.map(hash_file, [file for file, _ in own])
            for (file, expected), record in zip(own, found, strict=True):
                if record != expected:
                    msg = f"{file}: damaged (its hash is not the one in the manifest)"
                    raise CheckpointError(msg)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, no further file is read

    def _rank_state(self, manifest: Manifest) -> dict[str, Any]:
        """Return this rank's random state and buffers; additional ranks have none."""
        name = rank_file(self._ranks.rank)
        if name not in manifest.files:
            return {}
        rank_state: dict[str, Any] = from_file(self._path / name)
        # Buffers of another data layout are dropped: rank 0's are used by all ranks.
        buffers = rank_state.get("buffers", {}) if self._same_ranks(manifest) else {}
        rank_state["buffers"] = _without_wrappers(buffers)
        return rank_state

    def _gradients(
        self, manifest: Manifest, engine_state: Mapping[str, Any], stack: ExitStack
    ) -> SavedGradients | None:
        """Open the accumulated gradients of the checkpoint, if there are any to load."""
        saved = engine_state.get("window")
        if saved is None or not self._selection.with_states:
            return None
        names = sorted(name for name in manifest.files if name.startswith("gradients-"))
        reader = stack.enter_context(ShardReader(self._path / name for name in names))
        rank = self._state.share_rank(self._ranks.rank) if self._same_ranks(manifest) else None
        spans = self._state.divided.span
        return SavedGradients(reader, saved, self._state.stage.local_to_average, rank, spans)

    def _same_ranks(self, manifest: Manifest) -> bool:
        return manifest.was_saved_by(self._ranks.size, self._state.mesh.layout)

    def _other_states(self, manifest: Manifest) -> dict[str, dict[str, Any]]:
        """Read the non-elementwise optimizer states of all ranks."""
        states: dict[str, dict[str, Any]] = {}
        for name in sorted(manifest.files) if self._selection.with_states else ():
            if name.startswith("states-"):
                states |= _without_wrappers(from_file(self._path / name))
        return states

    def _common(self, engine_state: Mapping[str, Any]) -> Mapping[Any, Any]:
        """Return the optimizer's states under keys that are not parameters, if to load."""
        is_selected = self._selection.with_states
        return engine_state["optimizer"].get("common", {}).get("values", {}) if is_selected else {}

    def _accepts_any_states(self, engine_state: Mapping[str, Any]) -> bool:
        """Return whether it is the saved user class on full parameters, with arbitrary states."""
        optimizer = self._state.stage.optimizer
        same = engine_state["optimizer"].get("type") == type(optimizer).__name__
        return same and takes_any_states(optimizer)

    def _prepare(self, reader: ShardReader, other_states_or_scalars: Mapping[str, Any]) -> None:
        """Create optimizer states to fill, or drop states that the checkpoint lacks."""
        if not self._selection.with_states:
            return
        if other_states_or_scalars or any(kind != "master" for kind in reader.all_kinds):
            self._state.stage.updater.prepare_states()
        else:
            self._state.stage.optimizer.state.clear()

    def _plan(self) -> list[_ReadRequest]:
        with_states = self._selection.with_states
        return [
            _ReadRequest(
                piece.name,
                list(self._state.divided.shape(piece.name, piece.shape)),
                piece.start,
                piece.stop,
                frozenset(piece.tensors if with_states else ["master"]),
                self._state.divided.span(piece.name),
            )
            for piece in self._state.stage.pieces()
        ]

    def _tensor_problems(
        self,
        manifest: Manifest,
        reader: ShardReader,
        module_tensors: Mapping[str, Tensor],
        engine_state: Mapping[str, Any],
        names: set[str],  # of the whole model
    ) -> list[str]:
        # A parameter may have been frozen or unfrozen since the checkpoint was made.
        targets = self._targets()
        model = names - set(manifest.excluded)
        saved = {name: list(value.shape) for name, value in module_tensors.items()} | dict(
            manifest.shapes
        )
        name_problems = _check_names(model, set(saved), strict=self._selection.strict)
        shapes = dict(self._state.trainable) | {
            n: self._state.divided.shape(n, t.shape) for n, t in targets.items()
        }
        mismatches = [
            f"{name}: shape must be {list(shape)}, got {saved[name]}"
            for name, shape in shapes.items()
            if name in saved and list(shape) != saved[name]
        ]
        problems = []
        if mismatches:
            summary = f"shape mismatch for {len(mismatches)} of {len(saved)} tensors: "
            problems = [summary + "; ".join(first_few(mismatches))]
        problems += name_problems
        for name in targets.keys() & manifest.shapes.keys():
            numel = math.prod(saved[name])
            request = _ReadRequest(name, saved[name], 0, numel, frozenset({"master"}))
            problems += _gaps(request, reader)
        return problems + self._part_problems(engine_state)

    def _targets(self) -> dict[str, Tensor]:
        return module_targets(self._state.module, set(self._state.trainable))

    def _read_problems(
        self, plan: list[_ReadRequest], kinds: set[str], manifest: Manifest, reader: ShardReader
    ) -> list[str]:
        problems = []
        if self._selection.with_states and kinds != reader.all_kinds:
            problems.append(
                f"optimizer: keeps {_state_list(kinds)}, the checkpoint has "
                f"{_state_list(reader.all_kinds)}; load_optimizer_states=False resets it"
            )
        for request in plan:
            if manifest.shapes.get(request.name) == request.shape:
                problems += _gaps(request, reader)
        return problems

    def _check_window(self, gradients: SavedGradients | None, manifest: Manifest) -> None:
        if gradients is not None:
            steps = self._state.progress.batch.accumulation_steps
            self._raise_problems(
                gradients.state.resume_problems(steps) + gradients.missing(manifest.shapes)
            )

    def _raise_problems(self, problems: list[str]) -> None:
        if problems:
            summary = "\n  ".join(first_few(problems, _MAX_PROBLEMS))
            raise CheckpointError(f"{self._path}: does not fit: {summary}")

    def _part_problems(self, engine_state: Mapping[str, Any]) -> list[str]:
        problems = []
        groups = self._state.stage.optimizer.param_groups
        saved = engine_state["optimizer"]["groups"]
        if self._selection.with_states and len(saved) != len(groups):
            problems.append(
                f"optimizer: must have {len(saved)} parameter groups, got {len(groups)}"
            )
        part = engine_state["parts"].get("lr_scheduler")
        current = self._state.stateful.get("lr_scheduler")
        is_selected = self._selection.lr_scheduler and not self._selection.module_only
        if (
            is_selected
            and current is not None
            and part is not None
            and not _same_type(part, current)
        ):
            problems.append(
                f"lr_scheduler: must be {part['type']}, got {type(current).__name__}; "
                "load_lr_scheduler_states=False keeps the new one as it is"
            )
        return problems

    # -- changes --------------------------------------------------------------------------------

    def _fill(
        self, manifest: Manifest, reader: ShardReader, module_tensors: Mapping[str, Tensor]
    ) -> None:
        for piece in self._state.stage.pieces(write=True):
            if piece.name not in manifest.shapes:
                if piece.name in module_tensors:
                    local = self._state.divided.part(piece.name, module_tensors[piece.name])
                    flat_part = local.reshape(-1)[piece.start : piece.stop]
                    piece.tensors["master"].copy_(flat_part)
                continue
            for kind, tensor in piece.tensors.items():
                is_selected = kind == "master" or self._selection.with_states
                # A parameter that never had a gradient may have been saved without states. Then
                # those from prepare_states are right.
                if is_selected and kind in reader.kinds(piece.name):
                    span = self._state.divided.span(piece.name)
                    reader.read_into(piece.name, kind, piece.start, tensor, span)

    def _frozen_since(self, manifest: Manifest, reader: ShardReader) -> dict[str, Tensor]:
        """Read the full values of parameters that were trained then and are frozen now."""
        values = {}
        for name in self._targets():
            if name in manifest.shapes:
                value = torch.empty(manifest.shapes[name])
                reader.read_into(name, "master", 0, value.view(-1))
                values[name] = value
        return values

    def _set_module(self, module_values: Mapping[str, Tensor]) -> None:
        for name, target in self._targets().items():
            if name in module_values:
                value = self._state.divided.part(name, module_values[name])
                set_module_tensor(target, value)
                self._state.stage.originals.write(name, value)

    def _set_parts(self, engine_state: Mapping[str, Any], other_states: Mapping[str, Any]) -> None:
        set_module_extra_state(self._state.module, _without_wrappers(engine_state["module"]))
        if self._selection.module_only:
            return
        optimizer = self._state.stage.optimizer
        if self._selection.with_states:
            self._state.stage.updater.set_scalars(engine_state["optimizer"]["scalars"])
            self._state.stage.set_other_states(other_states)
            set_saved_common_states(optimizer, engine_state["optimizer"].get("common", {}))
            for group, saved in zip(
                optimizer.param_groups, engine_state["optimizer"]["groups"], strict=True
            ):
                group.update({k: v for k, v in saved.items() if k not in _IMPLEMENTATION_OPTIONS})
        for name, part in self._state.stateful.items():
            saved_part = engine_state["parts"].get(name)
            if saved_part is None or (name == "lr_scheduler" and not self._selection.lr_scheduler):
                continue
            # The class of the counters is an internal matter; other parts may be the user's.
            if name != "counters" and not _same_type(saved_part, part):
                logger.warning("%s: is now %s, its state is not loaded", name, type(part).__name__)
                continue
            part.load_state_dict(saved_part["state"])
            if name == "lr_scheduler" and not self._selection.with_states:
                _set_rates(optimizer, part)

    def _resume_window(self, gradients: SavedGradients) -> None:
        gradients.loss_scale = self._state.scaler.scale  # the scaler has been loaded before
        self._state.stage.resume_gradients(gradients)
        self._state.progress.resume_window(gradients.state)


def _without_wrappers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove ``torch.compile`` prefixes of earlier versions from names."""
    return {strip_compiled(name): value for name, value in values.items()}


def _same_type(saved: Mapping[str, Any], part: Any) -> bool:
    """Return whether a state belongs to this class; imported states may not know."""
    return saved["type"] in {None, type(part).__name__}


def _gaps(request: _ReadRequest, reader: ShardReader) -> list[str]:
    lines = []
    for kind in sorted(request.kinds & (reader.kinds(request.name) | {"master"})):
        gap = reader.missing(request.name, kind, request.start, request.stop, request.span)
        if gap is not None:
            lines.append(f"{request.name}: no {kind} for elements {gap[0]}:{gap[1]}")
    return lines


def _set_rates(optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    """Give a fresh optimizer the rates of a loaded schedule."""
    is_own_class = isinstance(schedule, LRSchedule)
    rates = schedule.get_lr() if is_own_class else schedule.get_last_lr()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _state_list(kinds: set[str]) -> str:
    states = sorted(kinds - {"master"})
    return ", ".join(states) if states else "no states"


def _check_names(model: set[str], saved: set[str], *, strict: bool) -> list[str]:
    problems = []
    if missing := sorted(model - saved):
        problems.append(f"not in the checkpoint: {', '.join(first_few(missing, _MAX_NAMES))}")
    if unexpected := sorted(saved - model):
        problems.append(f"not in the model: {', '.join(first_few(unexpected, _MAX_NAMES))}")
    if not problems:
        return []
    text = f"parameters and buffers: {'; '.join(problems)}"
    if strict:
        return [f"{text} (load_module_strict=False ignores this)"]
    logger.warning("%s", text)
    return []
