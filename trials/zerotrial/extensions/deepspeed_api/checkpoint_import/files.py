"""Reading of a DeepSpeed checkpoint's files, without DeepSpeed and without plain pickle.

DeepSpeed's files are pickles that refer to a few of its classes. Torch's restricted unpickler reads
them, with replacements for exactly these classes; any other class in a file is refused by name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from zerotrial.engine.checkpoint.files import (
    LATEST,
    MANIFEST,
    CheckpointError,
    CheckpointNotFoundError,
)

__all__ = ["Fragment", "Sources", "find_sources", "read_pickle"]

_MODEL = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_OPTIMIZER = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")


class Fragment:
    """Replacement of ``fragment_address``: range of a parameter in a rank's flat memory."""

    numel: int
    start: int


class _Scaler:
    """Replacement of DeepSpeed's loss scalers; only its attributes are read."""


class _Stage(IntEnum):
    """Replacement of ``ZeroStageEnum``."""

    DISABLED = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    WEIGHTS = 3


_REPLACEMENTS: list[Any] = [
    (Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(frozen=True)
class Sources:
    """Files of one DeepSpeed checkpoint."""

    directory: Path
    model: Sequence[Path]
    """Model files by data-parallel rank; one file at stages 0 to 2."""

    optimizer: Sequence[Path]
    """Optimizer files by data-parallel rank; none at stage 0."""


def find_sources(directory: Path, tag: str | None) -> Sources:
    """Return the files of a DeepSpeed checkpoint.

    Args:
        directory: Directory passed to DeepSpeed's ``save_checkpoint``.
        tag: None means the tag in its ``latest``.

    Raises:
        CheckpointNotFoundError: If there is no such checkpoint.
        CheckpointError: If a file is missing, or the layout is not supported.
    """
    if tag is None:
        try:
            tag = (directory / LATEST).read_text().strip()
        except OSError as error:
            msg = f"{directory / LATEST}: {error.strerror}; pass tag= to import an existing one"
            raise CheckpointNotFoundError(msg) from error
    path = directory / tag
    if not path.is_dir():
        msg = f"{path}: no such DeepSpeed checkpoint"
        raise CheckpointNotFoundError(msg)
    names = sorted(item.name for item in path.iterdir())
    if MANIFEST in names:
        msg = f"{path}: is already a Zerolab checkpoint; load it with load_checkpoint()"
        raise CheckpointError(msg)
    if (path / "zero" / "optimizer_state.pt").is_file():
        msg = f"{path}: is a universal checkpoint; import the ZeRO checkpoint it was converted from"
        raise CheckpointError(msg)
    other = [n for n in names if n.startswith(("layer_", "expp_rank_"))]
    parallel = [n for n in names if (m := _MODEL.match(n)) and int(m[2]) > 0]
    if other or parallel:
        msg = f"{path}: pipeline, tensor and expert parallel checkpoints cannot be imported "
        raise CheckpointError(f"{msg}(found {(other + parallel)[0]})")
    model = _by_rank(path, names, _MODEL)
    if not model:
        msg = f"{path}: no DeepSpeed checkpoint (no *_model_states.pt in it)"
        raise CheckpointNotFoundError(msg)
    return Sources(path, model, _by_rank(path, names, _OPTIMIZER))


def _by_rank(path: Path, names: Sequence[str], pattern: re.Pattern[str]) -> list[Path]:
    by_rank = {int(m[1] or 0): path / name for name in names if (m := pattern.match(name))}
    for rank in range(len(by_rank)):
        if rank not in by_rank:
            example = next(iter(by_rank.values())).name
            msg = f"{path}: the file of data-parallel rank {rank} is missing (like {example})"
            raise CheckpointError(msg)
    return [by_rank[rank] for rank in sorted(by_rank)]


def read_pickle(path: Path, allow: Sequence[Any] = ()) -> dict[str, Any]:
    """Read one file with torch's restricted unpickler.

    Args:
        path: Path of the file.
        allow: User classes that it may contain, e.g. ``argparse.Namespace``.

    Raises:
        CheckpointError: If the file is damaged, or names a class that is not allowed.
    """
    try:
        with torch.serialization.safe_globals([*_REPLACEMENTS, *allow]):
            content: dict[str, Any] = torch.load(
                path, map_location="cpu", weights_only=True, mmap=True
            )
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error))
        msg = f"{path}: missing, damaged, or not only tensors and numbers: {reason.strip()[:300]}"
        raise CheckpointError(msg) from error
    return content
