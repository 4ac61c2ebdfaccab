"""Wrappers around the forward of sharded layers, and of layers with partial results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import EngineError
from zerotrial.extensions.tensor_parallel.experts import local_experts
from zerotrial.extensions.tensor_parallel.plan import Layer, Move, Prepared
from zerotrial.extensions.tensor_parallel.plan_validation import is_transposed, layouts_of
from zerotrial.extensions.tensor_parallel.redistribution import (
    SEQUENCE,
    SPLIT,
    TensorRanks,
    enter,
    gather,
    leave,
    take,
)

__all__ = ["wrap"]

_DIMS = {"replicate": None, "split": SPLIT, "sequence": SEQUENCE}

OnUndo = Callable[[Callable[[], None]], None]


def wrap(layer: Layer, ranks: TensorRanks, on_undo: OnUndo) -> None:
    """Wrap a layer's forward with its communication.

    Args:
        layer: Layer with sharded parameters.
        ranks: Tensor-parallel ranks.
        on_undo: Registers an action for restoring the layer.
    """
    module = layer.module
    inner = module.forward
    style = layer.plan.style
    if isinstance(layer.plan, Prepared):
        outer = _prepared(layer.name, layer.plan, inner, ranks)
    elif style == "colwise":
        outer = _colwise(layer, inner, ranks)
    elif style == "rowwise" and isinstance(module, nn.Embedding):
        outer = _vocabulary_sharded(layer, module, inner, ranks, on_undo)
    elif style == "rowwise":
        outer = _rowwise(layer, inner, ranks)
    elif style == "experts":
        outer = local_experts(layer, inner, ranks, on_undo)
    elif style == "replicate":
        outer = _redistributed(layer, inner, ranks)
    else:
        outer = _summed(layer, inner, ranks)
    module.forward = functools.wraps(inner)(outer)


_Forward = Callable[..., Tensor]


def _colwise(layer: Layer, inner: _Forward, ranks: TensorRanks) -> _Forward:
    reads, gives = layouts_of(layer)
    tokens = isinstance(layer.module, nn.Embedding)

    def forward(x: Tensor) -> Tensor:
        out = inner(x if tokens else enter(x, ranks, sequence=reads == "sequence"))
        return gather(out, ranks, SPLIT) if gives == "replicate" else out

    return forward


def _rowwise(layer: Layer, inner: _Forward, ranks: TensorRanks) -> _Forward:
    module = layer.module
    reads, gives = layouts_of(layer)
    sequence = gives == "sequence"

    def forward(x: Tensor) -> Tensor:
        bias = getattr(module, "bias", None)
        with _parameters_replaced(module, {"bias": _zero_bias(module, bias)}):
            out = inner(take(x, ranks, SPLIT) if reads == "replicate" else x)
        out = leave(out, ranks, sequence=sequence)
        if bias is None:
            return out
        return out + (enter(bias, ranks) if sequence else bias)

    return forward


def _zero_bias(module: nn.Module, bias: Tensor | None) -> Tensor | None:
    """Return a zero bias if the bias is added later; GPT-2's layer must add something."""
    return torch.zeros_like(bias) if bias is not None and is_transposed(module) else None


def _vocabulary_sharded(
    layer: Layer, module: nn.Embedding, inner: _Forward, ranks: TensorRanks, on_undo: OnUndo
) -> _Forward:
    _, gives = layouts_of(layer)
    count = module.weight.shape[0]
    first = count * ranks.rank
    padding = module.padding_idx
    if padding is not None:  # its row is on one rank only
        module.padding_idx = padding - first if first <= padding < first + count else None
        on_undo(functools.partial(setattr, module, "padding_idx", padding))

    def forward(x: Tensor) -> Tensor:
        local = x - first
        elsewhere = (local < 0) | (local >= count)
        out = inner(local.masked_fill(elsewhere, 0))
        out = out.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave(out, ranks, sequence=gives == "sequence")

    return forward


def _summed(layer: Layer, inner: _Forward, ranks: TensorRanks) -> _Forward:
    """Wrap a replicated layer that computes a part: its gradients are summed."""
    module = layer.module

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        entered = {name: enter(p, ranks) for name, p in module._parameters.items() if p is not None}  # noqa: SLF001 - read by forward
        with _parameters_replaced(module, entered):
            return inner(*args, **kwargs)

    return forward


def _redistributed(layer: Layer, inner: _Forward, ranks: TensorRanks) -> _Forward:
    """Wrap a replicated layer that computes everything: redistribute its input and output."""
    reads, gives = (_DIMS[layout] for layout in layouts_of(layer))

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = inner(x if reads is None else gather(x, ranks, reads), *args, **kwargs)
        return out if gives is None else take(out, ranks, gives)

    return forward


def _prepared(name: str, plan: Prepared, inner: _Forward, ranks: TensorRanks) -> Callable[..., Any]:
    """Wrap a module of sharded layers: redistribute its inputs and outputs."""
    named = dict(plan.kwargs)

    def relay(what: str, values: tuple[Any, ...], moves: tuple[Move, ...]) -> tuple[Any, ...]:
        if len(values) != len(moves):
            raise EngineError(
                f"tensor_parallel_plan(): {name}: {what}_layouts must have one layout for each "
                f"{what}, or None; got {len(moves)} for {len(values)}"
            )
        return tuple(moved(*pair) for pair in zip(values, moves, strict=True))

    def moved(value: Any, move: Move) -> Any:
        if move is None or move[0] == move[1]:
            return value
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise EngineError(
                f"tensor_parallel_plan(): {name}: only tensors have a layout, got {kind}; use None"
            )
        origin, target = (_DIMS[layout] for layout in move)
        full = value if origin is None else gather(value, ranks, origin)
        return full if target is None else take(full, ranks, target)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if plan.args is not None:
            args = relay("input", args, plan.args)
        kwargs = {key: moved(value, named.get(key)) for key, value in kwargs.items()}
        out: Any = inner(*args, **kwargs)
        if plan.outputs is None:
            return out
        if isinstance(out, tuple | list):
            return relay("output", tuple(out), plan.outputs)
        return relay("output", (out,), plan.outputs)[0]

    return forward


@contextmanager
def _parameters_replaced(module: nn.Module, values: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Replace parameters of a layer by other tensors in the block."""
    parameters = module._parameters  # noqa: SLF001 - assignment takes parameters only
    before = {name: parameters[name] for name in values if name in parameters}
    try:
        parameters.update({name: values[name] for name in before})  # type: ignore[misc]
        yield
    finally:
        parameters.update(before)
