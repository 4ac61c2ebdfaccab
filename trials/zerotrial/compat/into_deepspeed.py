"""A checkpoint of our engine, loaded by the engine of a real DeepSpeed.

It is written anew in DeepSpeed's universal format, once on each machine, into a temporary folder,
and read from there; buffers and frozen weights, which DeepSpeed does not take from that format, are
put into the model here. So are optimizer states at stage 0, where it reads the weights alone.
"""

import inspect
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.sizes import first_few
from zerotrial.engine.checkpoint.deepspeed.universal import OWN_KEYS, export_deepspeed
from zerotrial.engine.checkpoint.files import LATEST, MANIFEST, CheckpointError, Manifest
from zerotrial.engine.checkpoint.ranks import CheckpointRanks
from zerotrial.engine.checkpoint.shards import read_tensors
from zerotrial.engine.checkpoint.state import module_targets

__all__ = ["take_our_checkpoints"]

logger = logging.getLogger(__name__)

_UNIVERSAL = "load_universal_checkpoint"

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_STATES = ("exp_avg", "exp_avg_sq")


def take_our_checkpoints(engine: Any) -> None:
    """Have a DeepSpeed engine's ``load_checkpoint`` read ours, too; other engines stay as they are.

    Args:
        engine: Of any kind.
    """
    names = {
        f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(engine).__mro__
    }
    if "deepspeed.DeepSpeedEngine" not in names:
        return
    theirs = engine.load_checkpoint
    signature = inspect.signature(theirs)

    def load_checkpoint(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        path = _path_of_ours(Path(bound.arguments["load_dir"]), bound.arguments["tag"])
        if path is None:
            found: tuple[Any, Any] = theirs(*args, **kwargs)
            return found
        return _Loading(engine, theirs, path, bound.arguments).run()

    engine.load_checkpoint = load_checkpoint


def _path_of_ours(directory: Path, tag: str | None) -> Path | None:
    latest = directory / LATEST
    name = tag or (latest.read_text(errors="replace").strip() if latest.is_file() else "")
    return directory / name if name and (directory / name / MANIFEST).is_file() else None


class _Loading:
    """One call of ``load_checkpoint``. **Collective**."""

    def __init__(self, engine: Any, theirs: Any, path: Path, options: Mapping[str, Any]) -> None:
        self._engine = engine
        self._theirs = theirs
        self._path = path
        self._options = dict(options)
        self._stage = int(engine.zero_optimization_stage())
        self._ranks = CheckpointRanks(dist.group.WORLD if dist.is_initialized() else None)

    def run(self) -> tuple[str, dict[str, Any]]:
        """Load it, and return what ``load_checkpoint`` does."""
        manifest = Manifest.read(self._path)
        self._check(manifest)
        shapes = manifest.shapes
        files = [self._path / name for name in manifest.files if name.startswith("module-")]
        schedule = getattr(self._engine, "lr_scheduler", None) is not None
        with self._exported() as folder:
            if schedule and not self._has_schedule(folder):
                logger.warning("%s: holds no schedule; it begins anew", self._path)
                self._options["load_lr_scheduler_states"] = False
            # The names are right, as has been checked; those of tied weights are saved once.
            given = {**self._options, "load_module_strict": False}
            if self._stage == 0:
                given["load_optimizer_states"] = False
            with self._universal():
                _, client = self._theirs(**{**given, "load_dir": folder, "tag": self._path.name})
            if self._stage == 0 and not self._weights_only:
                self._set_states(folder / self._path.name / "zero")
        self._set_rest(read_tensors(files))
        if self._ranks.rank == 0:
            logger.info(
                "%s: %d weights of Zerolab's engine, by way of DeepSpeed's universal format",
                self._path,
                len(shapes),
            )
        return str(self._path), {k: v for k, v in client.items() if k not in OWN_KEYS}

    @property
    def _weights_only(self) -> bool:
        whole = self._options["load_optimizer_states"] and not self._options["load_module_only"]
        return not whole

    def _check(self, manifest: Manifest) -> None:
        problems = []
        optimizer = self._engine.optimizer
        if self._stage == 0 and not self._weights_only and type(optimizer) not in _ADAMS:
            problems.append(
                "zero_optimization.stage: must be 1, 2 or 3 unless the optimizer is torch's own "
                f"Adam or AdamW, in fp32, got 0 with {type(optimizer).__name__}; stage 1 trains "
                "the same weights"
            )
        mine = {
            name: list(getattr(p, "ds_shape", p.shape))
            for name, p in self._engine.module.named_parameters()
            if p.requires_grad
        }
        for name in sorted(mine.keys() | manifest.shapes.keys()):
            here, there = mine.get(name), manifest.shapes.get(name)
            if here != there:
                found = "is not trained here" if here is None else f"has shape {here}"
                saved = "is not among those saved" if there is None else f"was saved as {there}"
                problems.append(f"{name}: {found}, and {saved}")
        if problems:
            msg = f"{self._path}: was saved by Zerolab's engine, and does not fit DeepSpeed's:\n  "
            raise CheckpointError(msg + "\n  ".join(first_few(problems, 8)))

    @contextmanager
    def _exported(self) -> Iterator[Path]:
        """Convert it on each machine's first rank; all its ranks get the folder. **Collective**."""
        own: Path | None = None
        try:
            with self._ranks.together():
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    own = Path(tempfile.mkdtemp(prefix="zerolab-to-deepspeed-"))
                    export_deepspeed(self._path.parent, own, self._path.name)
            host = socket.gethostname()
            places = self._ranks.allgather((host, own))
            yield next(place for other, place in places if other == host and place is not None)
            self._ranks.barrier()
        finally:
            if own is not None:
                shutil.rmtree(own, ignore_errors=True)

    def _has_schedule(self, folder: Path) -> bool:
        name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
        saved = torch.load(folder / self._path.name / name, weights_only=True, mmap=True)
        return saved["lr_scheduler"] is not None

    @contextmanager
    def _universal(self) -> Iterator[None]:
        """Have DeepSpeed read the universal format now, and its own again afterwards.

        Of weights alone, stages 0 to 2 read the module's.
        """
        if self._stage == 0 or (self._stage < 3 and self._weights_only):
            yield
            return
        config = self._engine._config  # noqa: SLF001 - load_universal is read at each call
        before = getattr(config, _UNIVERSAL)
        setattr(config, _UNIVERSAL, True)
        try:
            yield
        finally:
            setattr(config, _UNIVERSAL, before)

    def _set_states(self, folder: Path) -> None:
        """Put states and options into an Adam of torch's, which has all of them on each rank."""
        optimizer = self._engine.optimizer
        names = {parameter: name for name, parameter in self._engine.module.named_parameters()}
        saved = optimizer.state_dict()
        options = torch.load(folder / "optimizer_state.pt", weights_only=True)["param_groups"]
        groups = saved["param_groups"]
        if len(groups) != len(options):
            msg = f"{self._path}: optimizer: must have {len(options)} parameter groups, "
            raise CheckpointError(f"{msg}got {len(groups)}")
        for group, given in zip(groups, options, strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        saved["state"] = {
            index: state
            for index, parameter in enumerate(parameters)
            if (state := _adam_state(folder / names[parameter]))
        }
        if len(saved["state"]) < len(parameters):
            logger.warning(
                "%s: holds states of Adam for %d of %d parameters; the others' begin anew",
                self._path,
                len(saved["state"]),
                len(parameters),
            )
        optimizer.load_state_dict(saved)

    def _set_rest(self, values: Mapping[str, Tensor]) -> None:
        """Put buffers and frozen weights into the model. **Collective** at stage 3."""
        import deepspeed

        module: nn.Module = self._engine.module
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        for name, target in module_targets(module, trained).items():
            if name not in values:
                continue
            cut = [target] if hasattr(target, "ds_id") else []
            with deepspeed.zero.GatheredParameters(cut, modifier_rank=0), torch.no_grad():
                if not cut or self._ranks.rank == 0:
                    target.copy_(values[name])


def _adam_state(folder: Path) -> dict[str, Tensor]:
    """Of one parameter; empty before its first update."""
    if not all((folder / f"{kind}.pt").is_file() for kind in _STATES):
        return {}
    read = {kind: torch.load(folder / f"{kind}.pt", weights_only=True) for kind in _STATES}
    step = torch.load(folder / "step.pt", weights_only=True)
    return {"step": step, **{kind: found["param"] for kind, found in read.items()}}
