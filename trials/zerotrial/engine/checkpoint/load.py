"""Loading: all is checked before anything is changed, and each rank reads only what it owns."""

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerolab.formatting import first_few
from zerotrial.engine.checkpoint.beside import set_saved_common_states
from zerotrial.engine.checkpoint.files import (
    LATEST,
    MANIFEST,
    CheckpointError,
    CheckpointNotFoundError,
    Manifest,
    check_tag,
    hash_file,
    read_latest,
)
from zerotrial.engine.checkpoint.gradients import SavedGradients
from zerotrial.engine.checkpoint.ranks import CheckpointRanks
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
from zerotrial.engine.tensor.shard_spec import Span
from zerotrial.engine.update.checkpoint_support import takes_any_states

__all__ = ["Loader", "Selection", "find"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """Which parts of a checkpoint to load."""

    optimizer_states: bool = True
    lr_scheduler: bool = True
    module_only: bool = False
    strict: bool = True
    """Names of the checkpoint and of the model must agree."""

    @property
    def with_states(self) -> bool:
        """Whether optimizer states are wanted."""
        return self.optimizer_states and not self.module_only


def find(directory: Path, tag: str | None) -> Path:
    """Return the directory of a checkpoint.

    Args:
        directory: As it was passed to ``save_checkpoint``.
        tag: None means the one that ``latest`` names.

    Raises:
        CheckpointNotFoundError: If there is none.
        CheckpointError: If ``latest`` is damaged, or the tag is no folder name.
    """
    _refuse_deepspeed(directory, tag)
    path = directory / (read_latest(directory) if tag is None else check_tag(tag))
    if path.is_dir():
        return path
    there = sorted(item.name for item in directory.iterdir()) if directory.is_dir() else []
    origin = "latest names it" if tag is None else "the tag that was asked for"
    shown = f"there are: {', '.join(there)}" if there else f"{directory} is empty or missing"
    msg = f"{path}: no such checkpoint ({origin}); {shown}"
    raise CheckpointNotFoundError(msg)


_MAX_PROBLEMS, _MOST_NAMES = 8, 8
"""In one message: of another model, every tensor may be one."""

_OF_THE_DEVICE = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Options of an optimizer that say how it computes, not what."""


@dataclass(frozen=True)
class _Wish:
    """What this rank wants to read of one parameter."""

    name: str
    shape: list[int]
    start: int
    stop: int
    kinds: frozenset[str]
    span: Span | None = None
    """The part of it that the rank has, in which start and stop are counted; None: the whole."""


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
    """Reads one checkpoint into an engine's training state.

    Args:
        path: Directory of the checkpoint.
        state: Of the engine.
        ranks: That load together.
        selection: What is wanted.
    """

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
            CheckpointError: On all ranks; the state is as it was, unless the storage failed between
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
                whole = read_tensors(path for path in files if path.name.startswith("module-"))
                engine_state = from_file(self._path / ENGINE_STATE)
                client_state: dict[str, Any] = from_file(self._path / CLIENT_STATE)
                own = self._own_state(manifest)
                gradients = self._gradients(manifest, engine_state, stack)
                others = self._others(manifest)
                self._prepare(reader, others or engine_state["optimizer"]["scalars"])
                plan = self._plan()
            kinds = set().union(*self._ranks.allgather({k for wish in plan for k in wish.kinds}))
            model = set().union(*self._ranks.allgather(self._state.model_names()))
            keeps_others = any(self._ranks.allgather(bool(self._state.stage.other_states({}))))
            keeps_others |= self._makes_later_what_it_kept(engine_state)
            with self._ranks.together():
                problems = self._misfits(manifest, reader, whole, engine_state, model)
                problems += self._unreadable(plan, kinds, manifest, reader)
                beside = {name for states in others.values() for name in states}
                beside |= {str(key) for key in self._common(engine_state)}
                if beside and not keeps_others:
                    problems.append(
                        f"optimizer: must keep {_listed(beside)} of whole parameters, as the "
                        "checkpoint has them; load_optimizer_states=False starts it afresh"
                    )
                self._complain(problems)
                self._check_window(gradients, manifest)
            self._state.forget_window()
            with self._ranks.together():
                self._fill(manifest, reader, whole)
                rest = {**self._frozen_since(manifest, reader), **whole, **own.get("buffers", {})}
            self._set_module(rest)
            self._set_rest(engine_state, others)
            if gradients is not None:
                with self._ranks.together():
                    self._resume_window(gradients)
        self._state.stage.weights_changed()
        if "random" in own and not self._selection.module_only:
            set_random_state(own["random"])  # last: what came before may have drawn numbers
        return client_state

    # -- checks ---------------------------------------------------------------------------------

    def _verify(self, manifest: Manifest) -> None:
        """Compare sizes and hashes with the manifest; each rank reads some of the files."""
        for index, (name, expected) in enumerate(sorted(manifest.files.items())):
            file = self._path / name
            if not file.is_file():
                msg = f"{file}: missing; the manifest of the checkpoint lists it"
                raise CheckpointError(msg)
            if (size := file.stat().st_size) != expected.size:
                msg = f"{file}: damaged (must have {expected.size:,} bytes, got {size:,})"
                raise CheckpointError(msg)
            mine = index % self._ranks.size == self._ranks.rank
            if mine and hash_file(file) != expected:
                msg = f"{file}: damaged (its hash is not the one in the manifest)"
                raise CheckpointError(msg)

    def _own_state(self, manifest: Manifest) -> dict[str, Any]:
        """Return random generators and buffers of this rank; ranks that are new have none."""
        name = rank_file(self._ranks.rank)
        if name not in manifest.files:
            return {}
        own: dict[str, Any] = from_file(self._path / name)
        # Those of another division of the data do not count: rank 0's are for all.
        buffers = own.get("buffers", {}) if self._same_ranks(manifest) else {}
        own["buffers"] = _without_wrappers(buffers)
        return own

    def _gradients(
        self, manifest: Manifest, engine_state: Mapping[str, Any], stack: ExitStack
    ) -> SavedGradients | None:
        """Open what was gathered of an accumulation window, if there is any and it is wanted."""
        saved = engine_state.get("window")
        if saved is None or not self._selection.with_states:
            return None
        names = sorted(name for name in manifest.files if name.startswith("gradients-"))
        reader = stack.enter_context(ShardReader(self._path / name for name in names))
        rank = self._state.share_rank(self._ranks.rank) if self._same_ranks(manifest) else None
        spans = self._state.divided.span
        return SavedGradients(reader, saved, self._state.stage.share_factor, rank, spans)

    def _same_ranks(self, manifest: Manifest) -> bool:
        return manifest.was_saved_by(self._ranks.size, self._state.mesh.layout)

    def _others(self, manifest: Manifest) -> dict[str, dict[str, Any]]:
        """Read the optimizer states that do not go by element, of all ranks."""
        found: dict[str, dict[str, Any]] = {}
        for name in sorted(manifest.files) if self._selection.with_states else ():
            if name.startswith("states-"):
                found |= _without_wrappers(from_file(self._path / name))
        return found

    def _common(self, engine_state: Mapping[str, Any]) -> Mapping[Any, Any]:
        """What the optimizer kept under keys that are no parameters, if it is wanted."""
        wanted = self._selection.with_states
        return engine_state["optimizer"].get("common", {}).get("values", {}) if wanted else {}

    def _makes_later_what_it_kept(self, engine_state: Mapping[str, Any]) -> bool:
        """Whether the optimizer is a class of the user's, the one that was saved, and whole."""
        optimizer = self._state.stage.optimizer
        same = engine_state["optimizer"].get("type") == type(optimizer).__name__
        return same and takes_any_states(optimizer)

    def _prepare(self, reader: ShardReader, others: Mapping[str, Any]) -> None:
        """Give optimizer states somewhere to go, or drop those that the checkpoint is without."""
        if not self._selection.with_states:
            return
        stage = self._state.stage
        if others or any(kind != "master" for kind in reader.all_kinds):
            stage.prepare_states()
        else:
            stage.optimizer.state.clear()

    def _plan(self) -> list[_Wish]:
        with_states = self._selection.with_states
        return [
            _Wish(
                piece.name,
                list(self._state.divided.shape(piece.name, piece.shape)),
                piece.start,
                piece.stop,
                frozenset(piece.tensors if with_states else ["master"]),
                self._state.divided.span(piece.name),
            )
            for piece in self._state.stage.pieces()
        ]

    def _misfits(
        self,
        manifest: Manifest,
        reader: ShardReader,
        whole: Mapping[str, Tensor],
        engine_state: Mapping[str, Any],
        names: set[str],  # of the whole model
    ) -> list[str]:
        # A parameter may have been frozen, or set free, since the checkpoint was made.
        targets = self._targets()
        model = names - set(manifest.excluded)
        saved = {name: list(value.shape) for name, value in whole.items()} | dict(manifest.shapes)
        names_apart = _check_names(model, set(saved), strict=self._selection.strict)
        shapes = dict(self._state.trainable) | {
            n: self._state.divided.shape(n, t.shape) for n, t in targets.items()
        }
        unlike = [
            f"{name}: shape must be {list(shape)}, got {saved[name]}"
            for name, shape in shapes.items()
            if name in saved and list(shape) != saved[name]
        ]
        problems = []
        if unlike:
            summary = f"{len(unlike)} of its {len(saved)} tensors have not the model's shapes: "
            problems = [summary + "; ".join(first_few(unlike))]
        problems += names_apart
        for name in targets.keys() & manifest.shapes.keys():
            numel = math.prod(saved[name])
            wish = _Wish(name, saved[name], 0, numel, frozenset({"master"}))
            problems += _gaps(wish, reader)
        return problems + self._misfitting_parts(engine_state)

    def _targets(self) -> dict[str, Tensor]:
        return module_targets(self._state.module, set(self._state.trainable))

    def _unreadable(
        self, plan: list[_Wish], kinds: set[str], manifest: Manifest, reader: ShardReader
    ) -> list[str]:
        problems = []
        if self._selection.with_states and kinds != reader.all_kinds:
            problems.append(
                f"optimizer: keeps {_listed(kinds)}, the checkpoint has "
                f"{_listed(reader.all_kinds)}; load_optimizer_states=False starts it afresh"
            )
        for wish in plan:
            if manifest.shapes.get(wish.name) == wish.shape:
                problems += _gaps(wish, reader)
        return problems

    def _check_window(self, gradients: SavedGradients | None, manifest: Manifest) -> None:
        if gradients is not None:
            steps = self._state.progress.batch.accumulation_steps
            self._complain(
                gradients.state.resume_problems(steps) + gradients.missing(manifest.shapes)
            )

    def _complain(self, problems: list[str]) -> None:
        if problems:
            summary = "\n  ".join(first_few(problems, _MAX_PROBLEMS))
            raise CheckpointError(f"{self._path}: does not fit: {summary}")

    def _misfitting_parts(self, engine_state: Mapping[str, Any]) -> list[str]:
        problems = []
        groups = self._state.stage.optimizer.param_groups
        saved = engine_state["optimizer"]["groups"]
        if self._selection.with_states and len(saved) != len(groups):
            problems.append(
                f"optimizer: must have {len(saved)} parameter groups, got {len(groups)}"
            )
        part = engine_state["parts"].get("lr_scheduler")
        mine = self._state.stateful.get("lr_scheduler")
        wanted = self._selection.lr_scheduler and not self._selection.module_only
        if wanted and mine is not None and part is not None and not _same_type(part, mine):
            problems.append(
                f"lr_scheduler: must be {part['type']}, got {type(mine).__name__}; "
                "load_lr_scheduler_states=False keeps the new one as it is"
            )
        return problems

    # -- changes --------------------------------------------------------------------------------

    def _fill(self, manifest: Manifest, reader: ShardReader, whole: Mapping[str, Tensor]) -> None:
        for piece in self._state.stage.pieces(write=True):
            if piece.name not in manifest.shapes:
                if piece.name in whole:
                    mine = self._state.divided.part(piece.name, whole[piece.name])
                    part = mine.reshape(-1)[piece.start : piece.stop]
                    piece.tensors["master"].copy_(part)
                continue
            for kind, tensor in piece.tensors.items():
                wanted = kind == "master" or self._selection.with_states
                # A parameter that never had a gradient may have been saved without states; those
                # that prepare_states made are right for it.
                if wanted and kind in reader.kinds(piece.name):
                    span = self._state.divided.span(piece.name)
                    reader.read_into(piece.name, kind, piece.start, tensor, span)

    def _frozen_since(self, manifest: Manifest, reader: ShardReader) -> dict[str, Tensor]:
        """Read parameters whole that were trained then, and are frozen now."""
        found = {}
        for name in self._targets():
            if name in manifest.shapes:
                value = torch.empty(manifest.shapes[name])
                reader.read_into(name, "master", 0, value.view(-1))
                found[name] = value
        return found

    def _set_module(self, whole: Mapping[str, Tensor]) -> None:
        for name, target in self._targets().items():
            if name in whole:
                value = self._state.divided.part(name, whole[name])
                set_module_tensor(target, value)
                self._state.stage.originals.write(name, value)

    def _set_rest(self, engine_state: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        set_module_extra_state(self._state.module, _without_wrappers(engine_state["module"]))
        if self._selection.module_only:
            return
        optimizer = self._state.stage.optimizer
        if self._selection.with_states:
            self._state.stage.set_scalars(engine_state["optimizer"]["scalars"])
            self._state.stage.set_other_states(others)
            set_saved_common_states(optimizer, engine_state["optimizer"].get("common", {}))
            for group, saved in zip(
                optimizer.param_groups, engine_state["optimizer"]["groups"], strict=True
            ):
                group.update({k: v for k, v in saved.items() if k not in _OF_THE_DEVICE})
        for name, part in self._state.stateful.items():
            saved_part = engine_state["parts"].get(name)
            if saved_part is None or (name == "lr_scheduler" and not self._selection.lr_scheduler):
                continue
            # Which class counts is the engine's own affair; the other parts may be the user's.
            if name != "counters" and not _same_type(saved_part, part):
                logger.warning("%s: is now %s, so it starts afresh", name, type(part).__name__)
                continue
            part.load_state_dict(saved_part["state"])
            if name == "lr_scheduler" and not self._selection.with_states:
                _set_rates(optimizer, part)

    def _resume_window(self, gradients: SavedGradients) -> None:
        gradients.loss_scale = self._state.scaler.scale  # the scaler has been loaded by now
        self._state.stage.resume_gradients(gradients)
        self._state.progress.resume_window(gradients.state)


def _without_wrappers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove from names what wrappers of ``torch.compile`` put there, in earlier versions."""
    return {strip_compiled(name): value for name, value in values.items()}


def _same_type(saved: Mapping[str, Any], part: Any) -> bool:
    """Whether a state is of this class; imported ones do not always know."""
    return saved["type"] in {None, type(part).__name__}


def _gaps(wish: _Wish, reader: ShardReader) -> list[str]:
    found = []
    for kind in sorted(wish.kinds & (reader.kinds(wish.name) | {"master"})):
        gap = reader.missing(wish.name, kind, wish.start, wish.stop, wish.span)
        if gap is not None:
            found.append(f"{wish.name}: no {kind} for elements {gap[0]}:{gap[1]}")
    return found


def _set_rates(optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    """Give a fresh optimizer the rates that a loaded schedule has come to."""
    ours = isinstance(schedule, LRSchedule)
    rates = schedule.get_lr() if ours else schedule.get_last_lr()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _listed(kinds: set[str]) -> str:
    states = sorted(kinds - {"master"})
    return ", ".join(states) if states else "no states"


def _check_names(model: set[str], saved: set[str], *, strict: bool) -> list[str]:
    problems = []
    if missing := sorted(model - saved):
        problems.append(f"not in the checkpoint: {', '.join(first_few(missing, _MOST_NAMES))}")
    if unexpected := sorted(saved - model):
        problems.append(f"not in the model: {', '.join(first_few(unexpected, _MOST_NAMES))}")
    if not problems:
        return []
    text = f"parameters and buffers: {'; '.join(problems)}"
    if strict:
        return [f"{text} (load_module_strict=False ignores this)"]
    logger.warning("%s", text)
    return []
