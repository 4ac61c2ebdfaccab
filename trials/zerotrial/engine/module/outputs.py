"""Noticing a backward pass that nobody has announced: a plain ``loss.backward()``.

What the model returns gets a hook; a backward pass that comes there goes on into the model.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["comes_to", "watched"]


def watched(outputs: Any, came: Callable[[Tensor], Tensor], *, apart: bool) -> Any:
    """Have ``came`` called with the gradient of each output, and its result handed on.

    Args:
        outputs: Of a model: a tensor, or tuples, lists and dictionaries of such. Other objects are
            left alone.
        came: Called by autograd; returns the gradient that goes into the model.
        apart: ``came`` changes gradients: each tensor is put behind a view, since a loss may be
            returned beside the logits that it was made of, and the change must come only once.

    Returns:
        The outputs; dictionaries and lists are the same ones.
    """
    if isinstance(outputs, Tensor):
        if not outputs.requires_grad:
            return outputs
        outer = outputs.view_as(outputs) if apart else outputs
        outer.register_hook(came)  # type: ignore[no-untyped-call]
        return outer
    if isinstance(outputs, dict):
        _watch_members(outputs, list(outputs.items()), came, apart=apart)
    elif isinstance(outputs, list):
        _watch_members(outputs, list(enumerate(outputs)), came, apart=apart)
    elif isinstance(outputs, tuple):
        inner = [watched(part, came, apart=apart) for part in outputs]
        if any(new is not old for new, old in zip(inner, outputs, strict=True)):
            named: Any = outputs
            return named._make(inner) if hasattr(outputs, "_make") else type(outputs)(inner)
    return outputs


def _watch_members(
    container: Any, members: list[tuple[Any, Any]], came: Callable[[Tensor], Tensor], *, apart: bool
) -> None:
    for key, old in members:
        new = watched(old, came, apart=apart)
        if new is not old:
            container[key] = new


def comes_to(leaves: Iterable[Tensor]) -> bool:
    """Say whether the backward pass that is running will write the gradient of any of them.

    ``torch.autograd.grad`` writes none.
    """
    edge = torch.autograd.graph.get_gradient_edge
    try:
        will = torch._C._will_engine_execute_node  # noqa: SLF001 - as torch's multi-gradient hooks
        return any(will(edge(leaf).node) for leaf in leaves)
    except RuntimeError:  # so it says that the gradients are asked for by torch.autograd.grad
        return False
