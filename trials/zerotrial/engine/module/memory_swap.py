"""Replacement of a parameter's memory that preserves its identity."""

import torch
from torch import Tensor, nn

__all__ = ["swap_memory"]


def swap_memory(tensor: Tensor, value: Tensor) -> None:
    """Replace the memory of a parameter or buffer, even on another device.

    Args:
        tensor: Keeps its identity, its attributes and ``requires_grad``.
        value: Memory of the same shape and type; taken over.
    """
    marks = dict(vars(tensor))
    new = value
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(value, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
    vars(tensor).update(marks)
