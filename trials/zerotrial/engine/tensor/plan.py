"""Which layers of a model are cut, and how: from the file, the model itself, or its library."""

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

_OWN = "tensor_parallel_plan"


Move = tuple[str, str] | None
"""From which layout to which; None leaves a value as it is."""


class Prepared(LayerPlan):
    """What one of torch's ``PrepareModule`` styles says: what a module reads and gives is relaid.

    Whatever the module computes inside, gradients of what is whole are whole too: layers that are
    cut see to it.
    """

    args: tuple[Move, ...] | None = None
    """Of the arguments by place; None leaves all as they are."""

    kwargs: tuple[tuple[str, Move], ...] = ()
    """Of those by name."""

    outputs: tuple[Move, ...] | None = None
    """Of what the module returns."""


@dataclass(frozen=True)
class Layer:
    """A module, and what the plan says about it."""

    name: str
    module: nn.Module
    plan: LayerPlan
    of_library: bool = False
    """The plan is the library's own, not the user's."""


def find_layers(
    module: nn.Module,
    config: TensorParallelConfig,
    fitting: Callable[[set[str]], set[str]] = lambda own: own,
) -> tuple[list[Layer], list[str]]:
    """Match a plan with the modules of a model.

    Args:
        module: The whole model, or a pipeline stage of it.
        config: The ``tensor_parallel`` block.
        fitting: Makes of the patterns that fit a layer here those that fit one anywhere.

    Returns:
        The layers, in the model's order, and what is wrong with the plan.
    """
    if config.plan != "auto":
        return _match(module, config.plan, "tensor_parallel.plan", fitting)
    own = getattr(module, _OWN, None)
    if own is not None:
        given = own() if callable(own) else own
        plans, problems = _read(given)
        layers, more = _match(module, plans, f"{_OWN}()", fitting)
        return layers, problems + more
    given = dict(_of_library(module))
    if not given:
        return [], [
            f"tensor_parallel.plan: 'auto' asks the model, and {type(module).__name__} has neither "
            f"{_OWN}() nor a tp_plan; map names of its layers to styles, as in "
            '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'
        ]
    plans, problems = _read(given)
    known = dict(module.named_modules())
    # A library's plan may name what this model was built without; parameters of experts, too.
    found = [p for p in problems if any(_fits(p.partition(": ")[0], name) for name in known)]
    layers, more = _match(module, plans, "the model's tp_plan", lambda _: set(plans))
    layers = [replace(layer, of_library=True) for layer in layers]
    if not layers and not more and not found:
        more = [f"the model's tp_plan: fits no layer of {type(module).__name__}; give a plan"]
    return layers, found + more


def _read(given: Any) -> tuple[dict[str, LayerPlan], list[str]]:
    """Read a plan of the model's own: names of styles, torch's styles, or mappings."""
    if not isinstance(given, Mapping):
        return {}, [f"{_OWN}(): must return a mapping of names to styles, got {given!r}"]
    plans, problems = {}, []
    for name, style in given.items():
        try:
            written = layer_plan(_of_torch(style))
            plans[str(name)] = LayerPlan.model_validate(written)
        except ValidationError as error:
            problems += [f"{name}: {one['msg']}, got {one['input']!r}" for one in error.errors()]
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return plans, problems


def _of_torch(style: Any) -> Any:
    """Read one of torch's styles; anything else is left as it is."""
    kind = type(style).__name__
    if not type(style).__module__.startswith("torch.distributed.tensor.parallel"):
        return style
    if kind == "SequenceParallel":
        dims = {getattr(place, "dim", None) for place in (style.sequence_sharding)}
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
            f"got {kind}; say what a layer reads and gives by their input_layouts and "
            "output_layouts"
        )
    return {
        "style": kind.removesuffix("Parallel").lower(),
        "input": _layout(style.input_layouts),
        "output": _layout(style.output_layouts),
    }


def _prepared(reads: Any, gives: Any) -> Prepared:
    """Read a ``PrepareModule`` style; one of the two may say nothing of its side."""
    args = _moves(
        getattr(reads, "input_layouts", None), getattr(reads, "desired_input_layouts", None)
    )
    wanted = getattr(reads, "desired_input_kwarg_layouts", {})
    kwargs = tuple(
        (name, _move(layout, wanted.get(name)))
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


def _moves(layouts: Any, wanted: Any) -> tuple[Move, ...] | None:
    if layouts is None:
        return None
    return tuple(_move(*pair) for pair in zip(layouts, wanted, strict=True))


def _move(layout: Any, wanted: Any) -> Move:
    if layout is None or wanted is None:
        return None
    return _layout((layout,)), _layout((wanted,))


def _layout(layouts: Any) -> str:
    (layout,) = layouts
    if layout.is_replicate():
        return "replicate"
    if layout.is_partial():
        raise ValueError(
            "must be Replicate(), Shard(1) or Shard(-1), got Partial(): a sum is made where a "
            "rowwise layer ends; say its output_layouts"
        )
    dim = getattr(layout, "dim", None)
    if dim not in (1, -1):
        raise ValueError(
            f"must be Replicate(), Shard(1) or Shard(-1), got {layout!r}: activations are cut "
            "along tokens (dimension 1) or features (the last, written -1)"
        )
    return "sequence" if dim == 1 else "split"


def _of_library(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Collect what a Hugging Face model, and the models inside of it, say about their layers."""
    for prefix, part in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        plans = [getattr(part, "_tp_plan", None)]
        if getattr(part, "base_model", None) is part:
            plans.append(getattr(getattr(part, "config", None), "base_model_tp_plan", None))
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
        here = [pattern for pattern in plans if _fits(pattern, name)]
        used.update(here)
        if len({plans[pattern] for pattern in here}) > 1:
            both = " and ".join(map(repr, here))
            problems.append(f"{origin}: {name} fits {both}; keep one of the patterns")
        elif here:
            layers.append(Layer(name, part, plans[here[0]]))
    problems += [
        f"{origin}: {pattern!r} fits no layer{_closest(pattern, modules)}"
        for pattern in plans.keys() - everywhere(used)
    ]
    return layers, sorted(problems)


def _fits(pattern: str, name: str) -> bool:
    wanted, found = pattern.split("."), name.split(".")
    return len(wanted) == len(found) and all(
        fnmatch.fnmatchcase(part, sample) for part, sample in zip(found, wanted, strict=True)
    )


def _closest(pattern: str, names: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.4)
    return f"; the closest is {close[0]!r}" if close else ""
