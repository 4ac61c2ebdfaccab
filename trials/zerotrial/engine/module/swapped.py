"""Other memory for a parameter that stays the object by which optimizers and users know it."""

import torch
from torch import Tensor, nn

__all__ = ["become"]


def become(tensor: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer other memory, on another device even.

    Args:
        tensor: Keeps its identity, its attributes and whether it requires a gradient.
        value: Of the same shape and type; taken over.
    """
    marks = dict(vars(tensor))
    new = value
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(value, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
    vars(tensor).update(marks)
