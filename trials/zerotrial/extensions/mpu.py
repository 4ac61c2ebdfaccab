"""Mesh from an ``mpu``: process groups of model parallelism that a user has created."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerolab.errors import ConfigError
from zerotrial.engine.mesh import Axis, Mesh, is_model_parallel

__all__ = ["mesh_of"]

logger = logging.getLogger(__name__)

_DATA = ("get_data_parallel_group",)
_TENSOR = ("get_tensor_model_parallel_group", "get_slice_parallel_group")
_PIPE = ("get_pipe_parallel_group", "get_pipeline_model_parallel_group")
_MODEL = ("get_model_parallel_group",)
"""Methods of an ``mpu``: Megatron's names, and DeepSpeed's."""


def mesh_of(mpu: Any, module: nn.Module, *, tensor_size: int = 1) -> Mesh:
    """Build the mesh from an ``mpu``. **Collective** over the ranks of a model replica.

    If it only provides a model-parallel group, the parameters decide: if any is marked, or the
    engine shards over as many ranks, the group is the tensor axis, otherwise the pipe axis.

    Args:
        mpu: Provider of groups, with Megatron's or DeepSpeed's names.
        module: This rank's part of the model, before a stage takes it over.
        tensor_size: Number of ranks over which the engine shards matrices.

    Raises:
        ConfigError: If the groups do not fit together, or leave the layout undefined.
    """
    data = _group_from(mpu, _DATA)
    if data is None:
        raise ConfigError("initialize()", [f"mpu: must give {_DATA[0]}(), got none"])
    tensor, pipe, model = (_group_from(mpu, names) for names in (_TENSOR, _PIPE, _MODEL))
    if model is None:
        return Mesh(pipe or Axis(), data, tensor or Axis())
    if tensor is None and pipe is None:
        parameters_by_rank = _gather_parameters(model, module)
        if not any(rank_parameters.marked for rank_parameters in parameters_by_rank):
            is_tensor = model.size == tensor_size
            return Mesh(Axis(), data, model) if is_tensor else Mesh(model, data)
        _check_replicated(parameters_by_rank)
        return Mesh(Axis(), data, model)
    if tensor is None and pipe is not None and pipe.size == model.size:
        tensor = Axis()
    _check_sizes(tensor, pipe, model)
    assert tensor is not None
    return Mesh(pipe or Axis(), data, tensor, model)


def _group_from(mpu: Any, names: Iterable[str]) -> Axis | None:
    """Return an ``mpu``'s group under the first name that it has; None if it has none."""
    for name in names:
        method = getattr(mpu, name, None)
        group = method() if callable(method) else None
        if group is not None:
            return Axis(group)
    return None


def _check_sizes(tensor: Axis | None, pipe: Axis | None, model: Axis) -> None:
    if tensor is None:
        assert pipe is not None
        problem = (
            f"mpu: must give {_TENSOR[0]}() where {_MODEL[0]}() has more ranks ({model.size}) than "
            f"{_PIPE[0]}() ({pipe.size}), got none; it decides which parameters count"
        )
        raise ConfigError("initialize()", [problem])
    expected = model.size if pipe is None else tensor.size * pipe.size
    if expected != model.size or model.size % tensor.size:
        stages = "any number of" if pipe is None else pipe.size
        problem = (
            f"mpu: {_MODEL[0]}() must have tensor x pipe ranks, got {model.size} with "
            f"{tensor.size} along tensor and {stages} along pipe"
        )
        raise ConfigError("initialize()", [problem])


@dataclass(frozen=True)
class _RankParameters:
    """Parameters of one rank of a model-parallel group."""

    marked: bool
    replicated: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and digest of every parameter that is not marked."""


def _gather_parameters(model: Axis, module: nn.Module) -> list[_RankParameters]:
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    local = _RankParameters(
        any(is_model_parallel(parameter) for parameter in trained.values()),
        {n: (tuple(p.shape), _digest(p)) for n, p in trained.items() if not is_model_parallel(p)},
    )
    gathered: list[Any] = [local] * model.size
    dist.all_gather_object(gathered, local, group=model.group)
    return gathered


def _digest(parameter: nn.Parameter) -> str:
    value = parameter.detach().reshape(-1).contiguous().view(torch.uint8).cpu()
    return hashlib.blake2b(value.numpy().tobytes(), digest_size=16).hexdigest()


def _check_replicated(by_rank: list[_RankParameters]) -> None:
    """Check that unmarked parameters are replicated, as they are on a tensor axis."""
    names = sorted({name for parameters in by_rank for name in parameters.replicated})
    columns = {n: [ps.replicated.get(n, (None, "")) for ps in by_rank] for n in names}
    remedy = (
        "mark sharded parameters, and if ranks are pipeline stages, too, define "
        f"{_TENSOR[0]}() and {_PIPE[0]}()"
    )
    if unlike := [n for n in names if len({shape for shape, _ in columns[n]}) > 1]:
        problem = (
            f"mpu: ranks of {_MODEL[0]}() must all have every parameter that is not marked "
            f"model_parallel, in one shape, which does not hold for {_shortened(unlike)}; {remedy}"
        )
        raise ConfigError("initialize()", [problem])
    if unlike := [n for n in names if len(set(columns[n])) > 1]:
        logger.warning(
            "mpu: parameters that are not marked model_parallel count once in the gradient norm, "
            "because they must be equal on all ranks of %s(); these differ: %s; %s",
            _MODEL[0],
            _shortened(unlike),
            remedy,
        )


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
