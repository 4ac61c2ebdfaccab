"""Weights for use elsewhere: one safetensors file, whole tensors, the module's own names."""

import os
import secrets
from os import PathLike
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.checkpoint.ranks import CheckpointRanks
from zerotrial.engine.checkpoint.whole import gather_whole
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.seams import Stage
from zerotrial.engine.tensor.divide import Divided

__all__ = ["export_weights"]


def export_weights(
    module: nn.Module,
    stage: Stage,
    mesh: Mesh,
    divided: Divided,
    path: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    exclude_frozen_parameters: bool = False,
) -> str:
    """Write all weights and buffers to one file. **Collective**.

    ``model.load_state_dict(safetensors.torch.load_file(path))`` reads it: tied parameters stand
    there under each of their names. Rank 0 needs host memory for the whole model.

    Args:
        module: Whose weights and buffers.
        stage: That has the trained ones.
        mesh: Of the engine; rank 0 writes, and other pipeline stages send it what they have.
        divided: Puts parameters together that are cut over tensor-parallel ranks.
        path: Of the file; appears only when it is complete.
        dtype: Of floating-point parameters; None keeps the fp32 master weights. Buffers keep their
            types.
        exclude_frozen_parameters: Leave out parameters that are not trained.

    Returns:
        The path.

    Raises:
        CheckpointError: On all ranks, if the file cannot be written.
    """
    ranks = CheckpointRanks(mesh.saving.group)
    found = gather_whole(
        module, stage, mesh, divided, dtype=dtype, frozen=not exclude_frozen_parameters
    )
    with ranks.together():
        if ranks.rank == 0:
            _write(Path(path), found)
    return str(path)


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
