"""Full tensors of an engine by name, gathered one at a time or all on rank 0."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerotrial.engine.checkpoint.state import module_tensors, names_by_first
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.module.sharded_model import ShardedModel
from zerotrial.engine.protocols import StageWeights

__all__ = ["gather_full_state"]


def _full_tensors(
    module: nn.Module,
    stage: StageWeights,
    divided: ShardedModel,
    dtype: torch.dtype | None = None,
    *,
    frozen: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every full weight and persistent buffer by its first name. **Collective**.

    Args:
        module: Module with the weights and buffers.
        stage: Stage with the trained weights.
        divided: Gathers parameters that are sharded over tensor-parallel ranks.
        dtype: Type of floating-point parameters; None returns the master weights, and frozen
            ones in at least the masters' type. Buffers keep their types.
        frozen: Whether to include frozen parameters.
    """
    trained, wide = set(), None
    for name, tensor in stage.full_weights(dtype):
        trained.add(name)
        wide = tensor.dtype if wide is None else torch.promote_types(wide, tensor.dtype)
        yield name, divided.full(name, tensor)
    parameters = names_by_first(module)
    for name, tensor in module_tensors(module, trained, frozen=frozen, originals=stage.originals):
        value = divided.full(name, tensor)
        if name in parameters and tensor.is_floating_point():
            widened = value.dtype if wide is None else torch.promote_types(value.dtype, wide)
            value = value.to(dtype or widened)
        yield name, value


def gather_full_state(
    module: nn.Module,
    stage: StageWeights,
    mesh: Mesh,
    divided: ShardedModel,
    *,
    dtype: torch.dtype | None = None,
    frozen: bool = True,
) -> dict[str, Tensor]:
    """Gather weights and buffers of all pipeline stages in host memory. **Collective**.

    Args:
        module: This rank's part of the model.
        stage: Stage with the trained weights.
        mesh: The engine's mesh.
        divided: See :func:`_full_tensors`.
        dtype: See :func:`_full_tensors`.
        frozen: See :func:`_full_tensors`.

    Returns:
        On rank 0 by all names, including those of tied parameters, which share one tensor; on
        other ranks empty. With an mpu each part has its own result.
    """
    has_all_parts = mesh.all_ranks is not None
    first = mesh.data.rank == 0 and (not has_all_parts or mesh.tensor.rank == 0)
    sends = has_all_parts and mesh.pipe.rank > 0
    names, counts = names_by_first(module), mesh.counted_parameters(module.parameters())
    counted = {name for name, parameter in module.named_parameters() if parameter in counts}
    result: dict[str, Tensor] = {}
    # Collectives at stage 3, so every rank iterates.
    for name, tensor in _full_tensors(module, stage, divided, dtype, frozen=frozen):
        if not first or (name in names and name not in counted):
            continue
        value = tensor.detach().to("cpu", copy=True).contiguous()
        if sends:
            dist.send_object_list([(name, value)], group=mesh.pipe.group, group_dst=0)
        else:
            result.update(dict.fromkeys(names.get(name, [name]), value))
    if first and sends:
        dist.send_object_list([None], group=mesh.pipe.group, group_dst=0)
    elif first and has_all_parts:
        for stage_index in range(1, mesh.pipe.size):
            result.update(_received(mesh, stage_index))
    return result


def _received(mesh: Mesh, stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the values that another pipeline stage sends."""
    message: list[Any] = [()]
    while True:
        dist.recv_object_list(message, group=mesh.pipe.group, group_src=stage)
        if message[0] is None:
            return
        yield message[0]
