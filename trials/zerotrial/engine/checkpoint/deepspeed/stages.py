"""What DeepSpeed's files hold at each stage, taken apart into ranges of named parameters.

W is the number of data-parallel ranks that saved, P the elements that one of them kept of a group.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerotrial.engine.checkpoint.deepspeed.files import Sources
from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.checkpoint.shards import key_of

__all__ = ["OPTIONS", "Found", "read_stage0", "read_stage3", "read_stages_1_and_2"]

OPTIONS = (
    "lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov",
)  # fmt: skip
"""Of a parameter group; how the update is computed is for the engine to decide."""


@dataclass
class Found:
    """What was read of a checkpoint."""

    stage: int
    world_size: int
    shapes: dict[str, list[int]] = field(default_factory=dict)
    ranges: dict[str, Tensor] = field(default_factory=dict)
    """By ``NAME@START:STOP/KIND``."""

    whole: dict[str, Tensor] = field(default_factory=dict)
    """Buffers and frozen parameters."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)
    scaler: Any = None

    def add(self, name: str, start: int, tensors: Mapping[str, Tensor]) -> None:
        """Take in a range of a parameter."""
        for kind, tensor in tensors.items():
            if tensor.numel():
                flat = tensor.detach().reshape(-1)
                self.ranges[key_of(name, start, start + flat.numel(), kind)] = flat

    def take_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take in parameter groups, and the steps that fused optimizers count there."""
        self.groups = [{k: v for k, v in group.items() if k in OPTIONS} for group in groups]
        for index, group in enumerate(groups):
            if "step" in group:
                self.scalars[f"group{index}.step"] = float(group["step"])

    def take_scalars(self, group: int, state: Mapping[str, Any]) -> None:
        """Take in what an optimizer counts for each parameter."""
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                continue
            if isinstance(value, Tensor | int | float):
                self.scalars.setdefault(f"group{group}.{name}", float(value))


def read_stages_1_and_2(
    sources: Sources, model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]
) -> Found:
    """Each group is one flat tensor, cut into W parts of P elements."""
    first = optimizers[0]
    world = first["partition_count"][0]
    found = Found(int(first.get("zero_stage", 1)), world, scaler=first.get("loss_scaler"))
    if len(optimizers) != world:
        msg = f"{sources.directory}: must have optimizer files of {world} ranks, "
        raise CheckpointError(f"{msg}got {len(optimizers)}")
    for shapes in model["param_shapes"]:
        found.shapes |= {name: list(shape) for name, shape in shapes.items()}
    filled = dict.fromkeys(found.shapes, 0)
    for rank, state in enumerate(optimizers):
        for group, master in enumerate(state["single_partition_of_fp32_groups"]):
            base = _group_state(state["base_optimizer_state"], group)
            found.take_scalars(group, base)
            tensors = {"master": master} | _tensors(base)
            for name, start, numel in _fragments(model, state, group, rank):
                part = {kind: tensor[start : start + numel] for kind, tensor in tensors.items()}
                found.add(name, filled[name], part)
                filled[name] += numel
    base = first["base_optimizer_state"]
    found.take_options(base["param_groups"] if isinstance(base, dict) else [])
    found.whole = _rest_of_module(model, found.shapes)
    return found


def _fragments(
    model: Mapping[str, Any], state: Mapping[str, Any], group: int, rank: int
) -> Iterator[tuple[str, int, int]]:
    """Yield name, first element in the rank's part, and elements, in the order of the part."""
    if mappings := state.get("param_slice_mappings"):
        for name, fragment in mappings[group].items():
            yield name, int(fragment.start), int(fragment.numel)
        return
    kept = state["single_partition_of_fp32_groups"][group].numel() + state["group_paddings"][group]
    begin, at = rank * kept, 0
    for name, shape in model["param_shapes"][group].items():
        numel = math.prod(shape)
        start, stop = max(at, begin), min(at + numel, begin + kept)
        if start < stop:
            yield name, start - begin, stop - start
        at += numel


def read_stage3(
    models: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]
) -> Found:
    """Each parameter is cut into W equal parts, the last one padded; a rank's lie end to end."""
    world = int(optimizers[0]["partition_count"])
    if len(optimizers) != world or len(models) != world:
        counts = f"{len(models)} model and {len(optimizers)} optimizer files"
        msg = f"stage 3: must have the files of {world} ranks, got {counts}"
        raise CheckpointError(msg)
    found = Found(3, world, scaler=optimizers[0].get("loss_scaler"))
    for shapes in models[0]["param_shapes"]:
        found.shapes |= {name: list(shape) for name, shape in shapes.items()}
    for rank, state in enumerate(optimizers):
        base = state["optimizer_state_dict"]
        subgroups = [_group_state(base, index) for index in range(len(state["fp32_flat_groups"]))]
        tensors = {"master": torch.cat(list(state["fp32_flat_groups"]))}
        for kind in _tensors(subgroups[0]):
            tensors[kind] = torch.cat([subgroup[kind].reshape(-1) for subgroup in subgroups])
        at = 0
        for name, shape in found.shapes.items():
            part = -(-math.prod(shape) // world)
            start = min(rank * part, math.prod(shape))
            stop = min(start + part, math.prod(shape))
            cut = slice(at, at + stop - start)
            found.add(name, start, {kind: tensor[cut] for kind, tensor in tensors.items()})
            at += part
        found.take_options(base["param_groups"])
        for group in range(len(models[0]["param_shapes"])):
            found.take_scalars(group, subgroups[0])
    found.whole = {name: models[0]["module"][name] for name in models[0]["buffer_names"]}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        found.whole[name] = torch.cat(parts)[: math.prod(shape)].reshape(tuple(shape))
    return found


def read_stage0(
    sources: Sources, model: Mapping[str, Any], parameters: Sequence[Sequence[str]] | None
) -> Found:
    """Weights are the module's; the optimizer knows its parameters by number only."""
    optimizer = model["optimizer"]
    base = optimizer.get("optimizer_state_dict", optimizer)
    found = Found(0, int(model["dp_world_size"]))
    if optimizer.get("dynamic_loss_scale"):
        found.scaler = optimizer
    found.take_options(base["param_groups"])
    module = _rest_of_module(model, {})
    names = [n for n in module if n not in set(model["buffer_names"] or [])]
    masters = optimizer.get("fp32_groups")
    if flat := optimizer.get("fp32_groups_flat"):
        groups = list(parameters) if parameters is not None else [names]
        if len(groups) != len(flat):
            msg = f"{sources.directory}: pass parameters=, a list of names for each of the "
            raise CheckpointError(f"{msg}{len(flat)} optimizer groups")
        for index, (members, master) in enumerate(zip(groups, flat, strict=True)):
            state = _group_state(base, index)
            found.take_scalars(index, state)
            _cut_flat(found, module, members, {"master": master} | _tensors(state))
    else:
        counts = [len(group["params"]) for group in base["param_groups"]]
        shapes = [list(_shape_of(base["state"].get(i))) for i in range(sum(counts))]
        trained = _match(sources, module, names, shapes, parameters)
        group_of = [index for index, count in enumerate(counts) for _ in range(count)]
        flat_masters = [master for group in masters for master in group] if masters else None
        for index, name in enumerate(trained):
            state = base["state"].get(index, {})
            master = flat_masters[index] if flat_masters else module[name].float()
            found.shapes[name] = list(module[name].shape)
            found.add(name, 0, {"master": master} | _tensors(state))
            found.take_scalars(group_of[index], state)
    found.whole = {name: value for name, value in module.items() if name not in found.shapes}
    return found


def _cut_flat(
    found: Found,
    module: Mapping[str, Tensor],
    members: Sequence[str],
    tensors: Mapping[str, Tensor],
) -> None:
    at = 0
    for name in members:
        numel = module[name].numel()
        found.shapes[name] = list(module[name].shape)
        part = {kind: tensor.reshape(-1)[at : at + numel] for kind, tensor in tensors.items()}
        found.add(name, 0, part)
        at += numel


def _match(
    sources: Sources,
    module: Mapping[str, Tensor],
    names: Sequence[str],
    shapes: Sequence[list[int]],
    parameters: Sequence[Sequence[str]] | None,
) -> list[str]:
    """Find the names of parameters of which only order and shapes are known."""
    if parameters is not None:
        given = [name for group in parameters for name in group]
        fits = len(given) == len(shapes) and all(
            name in module and list(module[name].shape) == shape
            for name, shape in zip(given, shapes, strict=True)
        )
        if not fits:
            msg = f"{sources.directory}: parameters= must name {len(shapes)} parameters of shapes "
            raise CheckpointError(f"{msg}{shapes}, got {given}")
        return given
    # ways[i][j]: in how many ways shapes[j:] can be found, in order, among names[i:]
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
    found, j = [], 0
    for i, name in enumerate(names):
        if j < len(shapes) and list(module[name].shape) == shapes[j] and ways[i + 1][j + 1]:
            found.append(name)
            j += 1
    return found


def _shape_of(state: Mapping[str, Any] | None) -> Sequence[int]:
    for value in (state or {}).values():
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape
    return ()


def _group_state(base: Any, group: int) -> dict[str, Any]:
    """One group's optimizer state; elastic checkpoints keep a list of them."""
    if isinstance(base, dict):
        found: dict[str, Any] = base["state"].get(group, {})
    else:
        found = base[group]
    return found


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0}


def _rest_of_module(
    model: Mapping[str, Any], trained: Mapping[str, list[int]]
) -> dict[str, Tensor]:
    """Entries of the module that are not trained; of tied weights only the first name."""
    found: dict[str, Tensor] = {}
    tied = set(model.get("shared_params") or {})
    seen: set[int] = set()
    for name, value in model["module"].items():
        known = value.numel() > 0 and value.data_ptr() in seen
        if value.numel() > 0:
            seen.add(value.data_ptr())
        if name not in trained and name not in tied and not known:
            found[name] = value
    return found
