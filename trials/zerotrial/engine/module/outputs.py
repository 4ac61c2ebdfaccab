"""Noticing a backward pass that nobody has announced: a plain ``loss.backward()``.

What the model returns gets a hook; a backward pass that comes there goes on into the model.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["comes_to", "watch"]


def watch(outputs: Any, came: Callable[[Tensor], None]) -> None:
    """Have ``came`` called with the gradient of each output.

    Args:
        outputs: Of a model: a tensor, or tuples, lists and dictionaries of such. Other objects are
            left alone, and leaves, which outlive the call: a parameter, an input.
        came: Called by autograd.
    """
    if isinstance(outputs, Tensor):
        if outputs.grad_fn is not None:
            outputs.register_hook(came)  # type: ignore[no-untyped-call]
    elif isinstance(outputs, dict):
        for part in outputs.values():
            watch(part, came)
    elif isinstance(outputs, tuple | list):
        for part in outputs:
            watch(part, came)


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
