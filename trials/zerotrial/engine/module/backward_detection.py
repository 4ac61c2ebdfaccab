"""Detection of a backward pass outside of the engine: a plain ``loss.backward()``.

The model's outputs get a hook: a backward pass that reaches one continues into the model.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["reaches_leaves", "watch_outputs"]


def watch_outputs(outputs: Any, callback: Callable[[Tensor], None]) -> None:
    """Register a callback for the gradient of each output.

    Args:
        outputs: Output of a model: a tensor, or nested tuples, lists and dictionaries. Other
            objects are ignored, and so are leaves, which outlive the call: a parameter, an input.
        callback: Callback for autograd.
    """
    if isinstance(outputs, Tensor):
        if outputs.grad_fn is not None:
            outputs.register_hook(callback)  # type: ignore[no-untyped-call]
    elif isinstance(outputs, dict):
        for part in outputs.values():
            watch_outputs(part, callback)
    elif isinstance(outputs, tuple | list):
        for part in outputs:
            watch_outputs(part, callback)


def reaches_leaves(leaves: Iterable[Tensor]) -> bool:
    """Return whether the current backward pass will write the gradient of any leaf.

    ``torch.autograd.grad`` writes none.
    """
    edge = torch.autograd.graph.get_gradient_edge
    try:
        will = torch._C._will_engine_execute_node  # noqa: SLF001 - as torch's multi-gradient hooks
        return any(will(edge(leaf).node) for leaf in leaves)
    except RuntimeError:  # raised for gradients requested by torch.autograd.grad
        return False
