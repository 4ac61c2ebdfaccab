"""Conversion of the content of DeepSpeed's files at each stage to ranges of named parameters.

W is the number of data-parallel ranks that saved, P the elements of a group that one of them had.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.checkpoint.shards import key_of
from zerotrial.extensions.deepspeed_api.checkpoint_import.files import Sources

__all__ = ["OPTIONS", "ImportedState", "read_stage0", "read_stage3", "read_stages_1_and_2"]

OPTIONS = (
    "lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov",
)  # fmt: skip
"""Options of a parameter group to import; others belong to the engine's update."""


@dataclass
class ImportedState:
    """Content of a checkpoint."""

    stage: int
    world_size: int
    shapes: dict[str, list[int]] = field(default_factory=dict)
    ranges: dict[str, Tensor] = field(default_factory=dict)
    """Ranges by ``NAME@START:STOP/KIND``."""

    untrained: dict[str, Tensor] = field(default_factory=dict)
    """Buffers and frozen parameters."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)
    scaler: Any = None

    def add(self, name: str, start: int, tensors: Mapping[str, Tensor]) -> None:
        """Add a range of a parameter."""
        for kind, tensor in tensors.items():
            if tensor.numel():
                flat = tensor.detach().reshape(-1)
                self.ranges[key_of(name, start, start + flat.numel(), kind)] = flat

    def add_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Add parameter groups, and the step counts that fused optimizers keep in them."""
        self.groups = [{k: v for k, v in group.items() if k in OPTIONS} for group in groups]
        for index, group in enumerate(groups):
            if "step" in group:
                self.scalars[f"group{index}.step"] = float(group["step"])

    def add_scalars(self, group: int, state: Mapping[str, Any]) -> None:
        """Add the numbers that an optimizer keeps for each parameter."""
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                continue
            if isinstance(value, Tensor | int | float):
                self.scalars.setdefault(f"group{group}.{name}", float(value))


def read_stages_1_and_2(
    sources: Sources, model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]
) -> ImportedState:
    """Read stages 1 and 2: each group is one flat tensor in W parts of P elements."""
    first = optimizers[0]
    world = first["partition_count"][0]
    imported = ImportedState(
        int(first.get("zero_stage", 1)), world, scaler=first.get("loss_scaler")
    )
    if len(optimizers) != world:
        msg = f"{sources.directory}: must have optimizer files of {world} ranks, "
        raise CheckpointError(f"{msg}got {len(optimizers)}")
    for shapes in model["param_shapes"]:
        imported.shapes |= {name: list(shape) for name, shape in shapes.items()}
    filled = dict.fromkeys(imported.shapes, 0)
    for rank, state in enumerate(optimizers):
        for group, master in enumerate(state["single_partition_of_fp32_groups"]):
            base = _group_state(state["base_optimizer_state"], group)
            imported.add_scalars(group, base)
            tensors = {"master": master} | _tensors(base)
            for name, start, numel in _fragments(model, state, group, rank):
                part = {kind: tensor[start : start + numel] for kind, tensor in tensors.items()}
                imported.add(name, filled[name], part)
                filled[name] += numel
    base = first["base_optimizer_state"]
    imported.add_options(base["param_groups"] if isinstance(base, dict) else [])
    imported.untrained = _untrained_entries(model, imported.shapes)
    return imported


def _fragments(
    model: Mapping[str, Any], state: Mapping[str, Any], group: int, rank: int
) -> Iterator[tuple[str, int, int]]:
    """Yield name, first element in the rank's part, and length, in the order of the part."""
    if mappings := state.get("param_slice_mappings"):
        for name, fragment in mappings[group].items():
            yield name, int(fragment.start), int(fragment.numel)
        return
    stored = (
        state["single_partition_of_fp32_groups"][group].numel() + state["group_paddings"][group]
    )
    begin, position = rank * stored, 0
    for name, shape in model["param_shapes"][group].items():
        numel = math.prod(shape)
        start, stop = max(position, begin), min(position + numel, begin + stored)
        if start < stop:
            yield name, start - begin, stop - start
        position += numel


def read_stage3(
    models: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]
) -> ImportedState:
    """Read stage 3: each parameter is in W equal parts, the last one padded, concatenated."""
    world = int(optimizers[0]["partition_count"])
    if len(optimizers) != world or len(models) != world:
        counts = f"{len(models)} model and {len(optimizers)} optimizer files"
        msg = f"stage 3: must have the files of {world} ranks, got {counts}"
        raise CheckpointError(msg)
    imported = ImportedState(3, world, scaler=optimizers[0].get("loss_scaler"))
    for shapes in models[0]["param_shapes"]:
        imported.shapes |= {name: list(shape) for name, shape in shapes.items()}
    for rank, state in enumerate(optimizers):
        base = state["optimizer_state_dict"]
        subgroups = [_group_state(base, index) for index in range(len(state["fp32_flat_groups"]))]
        tensors = {"master": torch.cat(list(state["fp32_flat_groups"]))}
        for kind in _tensors(subgroups[0]):
            tensors[kind] = torch.cat([subgroup[kind].reshape(-1) for subgroup in subgroups])
        position = 0
        for name, shape in imported.shapes.items():
            part = -(-math.prod(shape) // world)
            start = min(rank * part, math.prod(shape))
            stop = min(start + part, math.prod(shape))
            part_range = slice(position, position + stop - start)
            imported.add(
                name, start, {kind: tensor[part_range] for kind, tensor in tensors.items()}
            )
            position += part
        imported.add_options(base["param_groups"])
        for group in range(len(models[0]["param_shapes"])):
            imported.add_scalars(group, subgroups[0])
    imported.untrained = {name: models[0]["module"][name] for name in models[0]["buffer_names"]}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        imported.untrained[name] = torch.cat(parts)[: math.prod(shape)].reshape(tuple(shape))
    return imported


def read_stage0(
    sources: Sources, model: Mapping[str, Any], parameters: Sequence[Sequence[str]] | None
) -> ImportedState:
    """Read stage 0: weights are the module's; the optimizer has parameter numbers only."""
    optimizer = model["optimizer"]
    base = optimizer.get("optimizer_state_dict", optimizer)
    imported = ImportedState(0, int(model["dp_world_size"]))
    if optimizer.get("dynamic_loss_scale"):
        imported.scaler = optimizer
    imported.add_options(base["param_groups"])
    module = _untrained_entries(model, {})
    names = [n for n in module if n not in set(model["buffer_names"] or [])]
    masters = optimizer.get("fp32_groups")
    if flat := optimizer.get("fp32_groups_flat"):
        groups = list(parameters) if parameters is not None else [names]
        if len(groups) != len(flat):
            msg = f"{sources.directory}: pass parameters=, a list of names for each of the "
            raise CheckpointError(f"{msg}{len(flat)} optimizer groups")
        for index, (members, master) in enumerate(zip(groups, flat, strict=True)):
            state = _group_state(base, index)
            imported.add_scalars(index, state)
            _add_flat(imported, module, members, {"master": master} | _tensors(state))
    else:
        counts = [len(group["params"]) for group in base["param_groups"]]
        shapes = [list(_shape_of(base["state"].get(i))) for i in range(sum(counts))]
        trained = _match_names(sources, module, names, shapes, parameters)
        group_of = [index for index, count in enumerate(counts) for _ in range(count)]
        flat_masters = [master for group in masters for master in group] if masters else None
        for index, name in enumerate(trained):
            state = base["state"].get(index, {})
            master = flat_masters[index] if flat_masters else module[name].float()
            imported.shapes[name] = list(module[name].shape)
            imported.add(name, 0, {"master": master} | _tensors(state))
            imported.add_scalars(group_of[index], state)
    imported.untrained = {
        name: value for name, value in module.items() if name not in imported.shapes
    }
    return imported


def _add_flat(
    imported: ImportedState,
    module: Mapping[str, Tensor],
    members: Sequence[str],
    tensors: Mapping[str, Tensor],
) -> None:
    position = 0
    for name in members:
        numel = module[name].numel()
        imported.shapes[name] = list(module[name].shape)
        part = {
            kind: tensor.reshape(-1)[position : position + numel]
            for kind, tensor in tensors.items()
        }
        imported.add(name, 0, part)
        position += numel


def _match_names(
    sources: Sources,
    module: Mapping[str, Tensor],
    names: Sequence[str],
    shapes: Sequence[list[int]],
    parameters: Sequence[Sequence[str]] | None,
) -> list[str]:
    """Find the names of parameters when only order and shapes are known."""
    if parameters is not None:
        flat_names = [name for group in parameters for name in group]
        fits = len(flat_names) == len(shapes) and all(
            name in module and list(module[name].shape) == shape
            for name, shape in zip(flat_names, shapes, strict=True)
        )
        if not fits:
            msg = f"{sources.directory}: parameters= must name {len(shapes)} parameters of shapes "
            raise CheckpointError(f"{msg}{shapes}, got {flat_names}")
        return flat_names
    # ways[i][j]: number of ways to match shapes[j:] in order among names[i:]
    ways = [[0] * (len(shapes) + 1) for _ in range(len(names) + 1)]
    for i in range(len(names), -1, -1):
        ways[i][len(shapes)] = 1
        for j in range(len(shapes)):
            if i < len(names):
                fits = list(module[names[i]].shape) == shapes[j]
                ways[i][j] = ways[i + 1][j] + (ways[i + 1][j + 1] if fits else 0)
    if ways[0][0] != 1:
        msg = (
            f"{sources.directory}: DeepSpeed saves no names at stage 0, and the shapes of "
            f"{len(shapes)} trained parameters fit the model's {len(names)} in {ways[0][0]} ways; "
            "pass parameters=, their names by optimizer group"
        )
        raise CheckpointError(msg)
    matched, j = [], 0
    for i, name in enumerate(names):
        if j < len(shapes) and list(module[name].shape) == shapes[j] and ways[i + 1][j + 1]:
            matched.append(name)
            j += 1
    return matched


def _shape_of(state: Mapping[str, Any] | None) -> Sequence[int]:
    for value in (state or {}).values():
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape
    return ()


def _group_state(base: Any, group: int) -> dict[str, Any]:
    """Return one group's optimizer state; elastic checkpoints have a list of them."""
    if isinstance(base, dict):
        group_state: dict[str, Any] = base["state"].get(group, {})
    else:
        group_state = base[group]
    return group_state


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0}


def _untrained_entries(
    model: Mapping[str, Any], trained: Mapping[str, list[int]]
) -> dict[str, Tensor]:
    """Return module entries that are not trained; of tied weights only the first name."""
    result: dict[str, Tensor] = {}
    tied = set(model.get("shared_params") or {})
    seen: set[int] = set()
    for name, value in model["module"].items():
        is_repeated = value.numel() > 0 and value.data_ptr() in seen
        if value.numel() > 0:
            seen.add(value.data_ptr())
        if name not in trained and name not in tied and not is_repeated:
            result[name] = value
    return result
