"""Weights for use elsewhere: one safetensors file, whole tensors, the module's own names."""

import os
import secrets
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from zerolab.errors import ConfigError
from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.checkpoint.state import module_tensors
from zerotrial.engine.comm.ranks import Ranks

if TYPE_CHECKING:
    from zerotrial.engine.engine import Engine

__all__ = ["export_weights", "save_16bit_model"]

_SIXTEEN_BITS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.bfloat16}


def export_weights(
    engine: "Engine",
    path: str | PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    exclude_frozen_parameters: bool = False,
) -> str:
    """Write all weights and buffers to one file. **Collective**.

    ``model.load_state_dict(safetensors.torch.load_file(path))`` reads it: tied parameters stand
    there under each of their names. Rank 0 needs host memory for the whole model.

    Args:
        engine: Whose model.
        path: Of the file; appears only when it is complete.
        dtype: Of floating-point parameters; None keeps the fp32 master weights. Buffers keep their
            types.
        exclude_frozen_parameters: Leave out parameters that are not trained.

    Returns:
        The path.

    Raises:
        CheckpointError: On all ranks, if the file cannot be written.
    """
    ranks = Ranks(engine.group)
    names = _names_by_first(engine.module)
    found: dict[str, Tensor] = {}

    def take(name: str, tensor: Tensor) -> None:
        if ranks.rank == 0:
            for alias in names.get(name, [name]):
                found[alias] = tensor.detach().to("cpu", copy=True).contiguous()

    trained = set()
    for name, tensor in engine.stage.full_weights(dtype):
        trained.add(name)
        take(name, tensor)
    rest = module_tensors(engine.module, trained, frozen=not exclude_frozen_parameters)
    for name, tensor in rest:
        is_weight = name in names and tensor.is_floating_point()
        take(name, tensor.to(dtype) if is_weight and dtype is not None else tensor)
    with ranks.together():
        if ranks.rank == 0:
            _write(Path(path), found)
    return str(path)


def _names_by_first(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by the first of them."""
    by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(parameter, []).append(name)
    return {names[0]: names for names in by_parameter.values()}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={"format": "pt"})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        msg = f"{path}: could not write {nbytes:,} bytes: {error}"
        raise CheckpointError(msg) from error
    finally:
        temporary.unlink(missing_ok=True)


def save_16bit_model(
    engine: "Engine",
    save_dir: str | PathLike[str],
    save_filename: str = "model.safetensors",
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's order
) -> bool:
    """Write the weights in 16 bits to one safetensors file. **Collective**.

    They are in the type that the model computes in; bf16 when that is fp32.

    Args:
        engine: Whose model.
        save_dir: Directory of the file.
        save_filename: Must end in ``.safetensors``.
        exclude_frozen_parameters: Leave out parameters that are not trained.

    Returns:
        True; DeepSpeed's callers look at it.

    Raises:
        ConfigError: At stage 3, if the config does not allow to gather whole weights, or for a file
            name that promises another format.
        CheckpointError: On all ranks, if the file cannot be written.
    """
    zero = engine.config.zero_optimization
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
    export_weights(
        engine,
        Path(save_dir) / save_filename,
        _SIXTEEN_BITS[engine.config.dtype],
        exclude_frozen_parameters=exclude_frozen_parameters,
    )
    return True
