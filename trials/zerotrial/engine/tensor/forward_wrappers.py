"""What is put around the forward of a layer that is cut, or computes a part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import EngineError
from zerotrial.engine.tensor.plan import Layer, Move, Prepared
from zerotrial.engine.tensor.plan_validation import is_transposed, layouts_of
from zerotrial.engine.tensor.redistribution import SEQUENCE, SPLIT, Line, enter, gather, leave, take

__all__ = ["wrap"]

_DIMS = {"replicate": None, "split": SPLIT, "sequence": SEQUENCE}

OnUndo = Callable[[Callable[[], None]], None]


def wrap(layer: Layer, line: Line, on_undo: OnUndo) -> None:
    """Put what moves between ranks around a layer's forward.

    Args:
        layer: Its parameters are cut already.
        line: The ranks.
        on_undo: Takes what is to be done when the layer becomes whole again.
    """
    module = layer.module
    inner = module.forward
    style = layer.plan.style
    if isinstance(layer.plan, Prepared):
        outer = _prepared(layer.name, layer.plan, inner, line)
    elif style == "colwise":
        outer = _colwise(layer, inner, line)
    elif style == "rowwise" and isinstance(module, nn.Embedding):
        outer = _by_vocabulary(layer, module, inner, line, on_undo)
    elif style == "rowwise":
        outer = _rowwise(layer, inner, line)
    elif style == "replicate":
        outer = _relaid(layer, inner, line)
    else:
        outer = _summed(layer, inner, line)
    module.forward = functools.wraps(inner)(outer)


_Forward = Callable[..., Tensor]


def _colwise(layer: Layer, inner: _Forward, line: Line) -> _Forward:
    reads, gives = layouts_of(layer)
    tokens = isinstance(layer.module, nn.Embedding)

    def forward(x: Tensor) -> Tensor:
        out = inner(x if tokens else enter(x, line, sequence=reads == "sequence"))
        return gather(out, line, SPLIT) if gives == "replicate" else out

    return forward


def _rowwise(layer: Layer, inner: _Forward, line: Line) -> _Forward:
    module = layer.module
    reads, gives = layouts_of(layer)
    sequence = gives == "sequence"

    def forward(x: Tensor) -> Tensor:
        bias = getattr(module, "bias", None)
        with _standing_in(module, {"bias": _nothing_like(module, bias)}):
            out = inner(take(x, line, SPLIT) if reads == "replicate" else x)
        out = leave(out, line, sequence=sequence)
        if bias is None:
            return out
        return out + (enter(bias, line) if sequence else bias)

    return forward


def _nothing_like(module: nn.Module, bias: Tensor | None) -> Tensor | None:
    """What a layer adds where the bias is added later: GPT-2's layer must add something."""
    return torch.zeros_like(bias) if bias is not None and is_transposed(module) else None


def _by_vocabulary(
    layer: Layer, module: nn.Embedding, inner: _Forward, line: Line, on_undo: OnUndo
) -> _Forward:
    _, gives = layouts_of(layer)
    count = module.weight.shape[0]
    first = count * line.rank
    padding = module.padding_idx
    if padding is not None:  # its row is on one rank
        module.padding_idx = padding - first if first <= padding < first + count else None
        on_undo(functools.partial(setattr, module, "padding_idx", padding))

    def forward(x: Tensor) -> Tensor:
        local = x - first
        elsewhere = (local < 0) | (local >= count)
        out = inner(local.masked_fill(elsewhere, 0))
        out = out.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave(out, line, sequence=gives == "sequence")

    return forward


def _summed(layer: Layer, inner: _Forward, line: Line) -> _Forward:
    """Around a layer that is whole and computes a part: its gradients are summed."""
    module = layer.module

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        found = {name: enter(p, line) for name, p in module._parameters.items() if p is not None}  # noqa: SLF001 - what forward reads
        with _standing_in(module, found):
            return inner(*args, **kwargs)

    return forward


def _relaid(layer: Layer, inner: _Forward, line: Line) -> _Forward:
    """Around a layer that is whole and computes all: only what it reads and gives changes."""
    reads, gives = (_DIMS[layout] for layout in layouts_of(layer))

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = inner(x if reads is None else gather(x, line, reads), *args, **kwargs)
        return out if gives is None else take(out, line, gives)

    return forward


def _prepared(name: str, plan: Prepared, inner: _Forward, line: Line) -> Callable[..., Any]:
    """Around a module whose layers are cut: what it reads and gives changes."""
    named = dict(plan.kwargs)

    def relay(what: str, values: tuple[Any, ...], moves: tuple[Move, ...]) -> tuple[Any, ...]:
        if len(values) != len(moves):
            raise EngineError(
                f"tensor_parallel_plan(): {name}: {what}_layouts must say one layout for each "
                f"{what}, or None; got {len(moves)} for {len(values)}"
            )
        return tuple(moved(*pair) for pair in zip(values, moves, strict=True))

    def moved(value: Any, move: Move) -> Any:
        if move is None or move[0] == move[1]:
            return value
        if not isinstance(value, Tensor):
            found = type(value).__name__
            raise EngineError(
                f"tensor_parallel_plan(): {name}: only tensors have a layout, got {found}; say None"
            )
        origin, target = (_DIMS[layout] for layout in move)
        whole = value if origin is None else gather(value, line, origin)
        return whole if target is None else take(whole, line, target)

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
def _standing_in(module: nn.Module, values: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Have a layer compute with other tensors than its parameters."""
    own = module._parameters  # noqa: SLF001 - assignment takes parameters only
    before = {name: own[name] for name in values if name in own}
    try:
        own.update({name: values[name] for name in before})  # type: ignore[misc]
        yield
    finally:
        own.update(before)
