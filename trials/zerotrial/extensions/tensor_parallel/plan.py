"""Tensor-parallel plan: from the configuration, the model, or its library."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from torch import nn

from zerolab.config.engine.parallel import LayerPlan, TensorParallelConfig, layer_plan

__all__ = ["Layer", "Move", "Prepared", "find_layers"]

_PLAN_ATTRIBUTE = "tensor_parallel_plan"
_EXPERT_WEIGHT = "grouped_gemm"
"""Hugging Face's style of a parameter whose first dimension is the expert."""

Move = tuple[str, str] | None
"""Source and target layout; None leaves a value unchanged."""


class Prepared(LayerPlan):
    """Plan of a torch ``PrepareModule`` style: inputs and outputs are redistributed.

    Gradients of replicated values are complete whatever the module contains: its sharded layers
    ensure it.
    """

    args: tuple[Move, ...] | None = None
    """Moves of positional arguments; None leaves them unchanged."""

    kwargs: tuple[tuple[str, Move], ...] = ()
    """Moves of keyword arguments."""

    outputs: tuple[Move, ...] | None = None
    """Moves of outputs."""


@dataclass(frozen=True)
class Layer:
    """Module with its plan."""

    name: str
    module: nn.Module
    plan: LayerPlan
    of_library: bool = False
    """Whether the plan is the library's, not the user's."""


def find_layers(
    module: nn.Module,
    config: TensorParallelConfig,
    fitting: Callable[[set[str]], set[str]] = lambda local_part: local_part,
) -> tuple[list[Layer], list[str]]:
    """Match a plan with the modules of a model.

    Args:
        module: The model, or a pipeline stage of it.
        config: The ``tensor_parallel`` block.
        fitting: Merges the patterns that match here with those of other stages.

    Returns:
        The layers in the model's order, and the problems of the plan.
    """
    if config.plan != "auto":
        return _match(module, config.plan, "tensor_parallel.plan", fitting)
    model_plan = getattr(module, _PLAN_ATTRIBUTE, None)
    if model_plan is not None:
        plan_source = model_plan() if callable(model_plan) else model_plan
        plans, problems = _read(plan_source)
        layers, more = _match(module, plans, f"{_PLAN_ATTRIBUTE}()", fitting)
        return layers, problems + more
    plan_source = _library_plan(module)
    if not plan_source:
        return [], [
            f"tensor_parallel.plan: 'auto' asks the model, and {type(module).__name__} has neither "
            f"{_PLAN_ATTRIBUTE}() nor a tp_plan; map names of its layers to styles, as in "
            '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'
        ]
    plans, problems = _read(plan_source)
    names = dict(module.named_modules())
    # A library's plan may name modules that this model lacks, or parameters of experts.
    unknown = [problem.partition(": ")[0] for problem in problems]
    relevant = [
        f"the model's tp_plan: {pattern}: the style {plan_source[pattern]!r} is not supported; set "
        "tensor_parallel.plan to the layers to divide"
        for pattern in unknown
        if any(_matches(pattern, name) for name in names)
    ]
    layers, more = _match(module, plans, "the model's tp_plan", lambda _: set(plans))
    layers = [replace(layer, of_library=True) for layer in layers]
    if not layers and not more and not relevant:
        more = [f"the model's tp_plan: fits no layer of {type(module).__name__}; give a plan"]
    return layers, relevant + more


def _read(plan: Any) -> tuple[dict[str, LayerPlan], list[str]]:
    """Read a model's plan: names of styles, torch's styles, or mappings."""
    if not isinstance(plan, Mapping):
        return {}, [f"{_PLAN_ATTRIBUTE}(): must return a mapping of names to styles, got {plan!r}"]
    plans, problems = {}, []
    for name, style in plan.items():
        try:
            written = layer_plan(_from_torch_style(style))
            plans[str(name)] = LayerPlan.model_validate(written)
        except ValidationError as error:
            problems += [f"{name}: {item['msg']}, got {item['input']!r}" for item in error.errors()]
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return plans, problems


def _from_torch_style(style: Any) -> Any:
    """Convert one of torch's styles; return anything else unchanged."""
    kind = type(style).__name__
    if not type(style).__module__.startswith("torch.distributed.tensor.parallel"):
        return style
    if kind == "SequenceParallel":
        dims = {getattr(placement, "dim", None) for placement in (style.sequence_sharding)}
        if dims != {1}:
            raise ValueError(f"SequenceParallel: tokens must lie along dimension 1, got {dims}")
        return "sequence"
    if kind.startswith("PrepareModule"):
        return _prepared(
            getattr(style, "prepare_module_input", style),
            getattr(style, "prepare_module_output", style),
        )
    if kind not in ("ColwiseParallel", "RowwiseParallel"):
        raise ValueError(
            f"must be ColwiseParallel, RowwiseParallel, SequenceParallel or a PrepareModule style, "
            f"got {kind}; describe a layer's input and output by their input_layouts and "
            "output_layouts"
        )
    return {
        "style": kind.removesuffix("Parallel").lower(),
        "input": _layout(style.input_layouts),
        "output": _layout(style.output_layouts),
    }


def _prepared(reads: Any, gives: Any) -> Prepared:
    """Convert a ``PrepareModule`` style, for inputs, outputs or both."""
    args = _moves(
        getattr(reads, "input_layouts", None), getattr(reads, "desired_input_layouts", None)
    )
    desired = getattr(reads, "desired_input_kwarg_layouts", {})
    kwargs = tuple(
        (name, _move(layout, desired.get(name)))
        for name, layout in getattr(reads, "input_kwarg_layouts", {}).items()
    )
    outputs = _moves(
        getattr(gives, "output_layouts", None), getattr(gives, "desired_output_layouts", None)
    )
    moves = [*(args or ()), *dict(kwargs).values(), *(outputs or ())]
    tokens = any("sequence" in move for move in moves if move is not None)
    return Prepared(
        style="replicate",
        input="sequence" if tokens else None,
        args=args,
        kwargs=kwargs,
        outputs=outputs,
    )


def _moves(layouts: Any, desired: Any) -> tuple[Move, ...] | None:
    if layouts is None:
        return None
    return tuple(_move(*pair) for pair in zip(layouts, desired, strict=True))


def _move(layout: Any, desired: Any) -> Move:
    if layout is None or desired is None:
        return None
    return _layout((layout,)), _layout((desired,))


def _layout(layouts: Any) -> str:
    (layout,) = layouts
    if layout.is_replicate():
        return "replicate"
    if layout.is_partial():
        raise ValueError(
            "must be Replicate(), Shard(1) or Shard(-1), got Partial(): a rowwise layer sums at "
            "its end; set its output_layouts"
        )
    dim = getattr(layout, "dim", None)
    if dim not in (1, -1):
        raise ValueError(
            f"must be Replicate(), Shard(1) or Shard(-1), got {layout!r}: activations are cut "
            "along tokens (dimension 1) or features (the last, written -1)"
        )
    return "sequence" if dim == 1 else "split"


def _library_plan(module: nn.Module) -> dict[str, str]:
    """Return the plan of a Hugging Face model, with its experts divided by expert."""
    expert_plans = dict(_library_plans(module, "ep_plan"))
    experts = {
        name.rpartition(".")[0] for name, style in expert_plans.items() if style == _EXPERT_WEIGHT
    }
    # The tensor-parallel plan divides the matrices of each expert instead.
    return {**dict(_library_plans(module, "tp_plan")), **dict.fromkeys(experts, "experts")}


def _library_plans(module: nn.Module, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the plans of one kind of a Hugging Face model and of the models inside of it."""
    for prefix, part in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        plans = [getattr(part, f"_{kind}", None)]
        if getattr(part, "base_model", None) is part:
            plans.append(getattr(getattr(part, "config", None), f"base_model_{kind}", None))
        for plan in plans:
            if isinstance(plan, Mapping):
                for name, style in plan.items():
                    yield f"{dot}{name}", style


def _match(
    module: nn.Module,
    plans: Mapping[str, LayerPlan],
    origin: str,
    everywhere: Callable[[set[str]], set[str]],
) -> tuple[list[Layer], list[str]]:
    layers, problems = [], []
    used: set[str] = set()
    modules = {name: part for name, part in module.named_modules() if name}
    for name, part in modules.items():
        patterns = [pattern for pattern in plans if _matches(pattern, name)]
        used.update(patterns)
        if len({plans[pattern] for pattern in patterns}) > 1:
            both = " and ".join(map(repr, patterns))
            problems.append(f"{origin}: {name} fits {both}; keep one of the patterns")
        elif patterns:
            layers.append(Layer(name, part, plans[patterns[0]]))
    problems += [
        f"{origin}: {pattern!r} fits no layer{_closest(pattern, modules)}"
        for pattern in plans.keys() - everywhere(used)
    ]
    return layers, sorted(problems)


def _matches(pattern: str, name: str) -> bool:
    pattern_parts, name_parts = pattern.split("."), name.split(".")
    return len(pattern_parts) == len(name_parts) and all(
        fnmatch.fnmatchcase(part, sample)
        for part, sample in zip(name_parts, pattern_parts, strict=True)
    )


def _closest(pattern: str, names: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.4)
    return f"; the closest is {close[0]!r}" if close else ""
