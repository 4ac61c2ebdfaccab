"""Weights in files: export to one safetensors file, and reading without an engine."""

import os
import secrets
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from zerotrial.engine.checkpoint.files import CheckpointError, Manifest, hash_file
from zerotrial.engine.checkpoint.load import find
from zerotrial.engine.checkpoint.shards import ShardReader, read_tensors

__all__ = ["read_weights", "write_weights"]


def read_weights(directory: str | PathLike[str], tag: str | None = None) -> dict[str, Tensor]:
    """Read all weights and buffers of a checkpoint into memory.

    Args:
        directory: Directory of a trial's checkpoint, or the one passed to ``save_checkpoint``; any
            stage and number of ranks.
        tag: None means the tag in ``latest``; ``model1`` is the second engine of a trial.

    Returns:
        Weights by the module's names, including tied ones; trained weights are fp32.

    Raises:
        CheckpointNotFoundError: If there is no such checkpoint.
        CheckpointError: If a file is damaged or missing.

    Example:
        >>> import torch
        >>> import zerotrial
        >>> model = torch.nn.Linear(2, 1)
        >>> config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
        >>> engine, *_ = zerotrial.initialize(model=model, config=config)
        >>> _ = engine.save_checkpoint("checkpoints", tag="first")
        >>> weights = zerotrial.read_weights("checkpoints")
        >>> {name: tuple(weight.shape) for name, weight in weights.items()}
        {'bias': (1,), 'weight': (1, 2)}
    """
    path = find(Path(directory), tag)
    manifest = Manifest.read(path)
    for name, record in manifest.files.items():
        if name.endswith(".safetensors") and hash_file(path / name) != record:
            raise CheckpointError(f"{path / name}: damaged (its hash is not the manifest's)")
    files = [path / name for name in manifest.files]
    weights = dict(read_tensors(file for file in files if file.name.startswith("module-")))
    shards = (file for file in files if file.name.startswith("rank-"))
    with ShardReader(file for file in shards if file.suffix == ".safetensors") as reader:
        for name, shape in manifest.shapes.items():
            weights[name] = reader.read_full(name, "master", shape)
    for first, names in manifest.tied.items():
        weights |= {name: weights[first] for name in names if first in weights}
    return weights


def _without_sharing(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors with several names, because safetensors rejects shared memory."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone() if id(tensor) in seen else tensor
        seen.add(id(tensor))
    return result


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to one file, which appears when it is complete.

    Raises:
        CheckpointError: If it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_without_sharing(tensors), temporary, metadata={"format": "pt"})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        msg = f"{path}: could not write {nbytes:,} bytes: {error}"
        raise CheckpointError(msg) from error
    finally:
        temporary.unlink(missing_ok=True)
