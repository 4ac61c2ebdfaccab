"""State dict of any checkpoint: of an engine, or a file that a script saved."""

import pickle
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from zerolab.errors import ConfigError
from zerotrial.engine.checkpoint.files import CheckpointNotFoundError
from zerotrial.extensions.full_weights.export import read_weights

__all__ = ["load_state_dict"]

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def load_state_dict(directory: str | Path) -> dict[str, Tensor]:
    """Load the weights of a checkpoint, on the CPU.

    Args:
        directory: Directory of a trial's checkpoint.

    Returns:
        Weights of the engine's checkpoint, or of the only file with weights.

    Raises:
        ConfigError: If there is no such file, or several, or one with other objects than tensors.
    """
    directory = Path(directory)
    try:
        return read_weights(directory)
    except CheckpointNotFoundError:
        pass  # a checkpoint of a script
    source = f"checkpoint {directory.name}"
    remedy = "use download() and load them yourself"
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    candidates = [path for path in files if path.suffix in _SUFFIXES]
    if len(candidates) != 1:
        shown = candidates or [path for path in files if path.name != "checkpoint.json"]
        names = ", ".join(str(path.relative_to(directory)) for path in shown) or "no files"
        kinds = "an engine checkpoint, or one file of .safetensors, .pt, .pth or .bin"
        raise ConfigError(source, [f"files: must be {kinds}, got {names}; {remedy}"])
    (path,) = candidates
    if path.suffix == ".safetensors":
        return load_file(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        problem = f"{path.name}: must contain tensors only, got other Python objects; {remedy}"
        raise ConfigError(source, [problem]) from None
    if not isinstance(content, dict) or not all(
        isinstance(item, Tensor) for item in content.values()
    ):
        problem = f"{path.name}: must be a state dict, names to tensors; {remedy}"
        raise ConfigError(source, [problem])
    return content
