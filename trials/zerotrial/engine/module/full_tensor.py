"""Full values of tensors that may be sharded, and replacement of a parameter's memory."""

from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "full_tensor_of",
    "is_sharded",
    "swap_memory",
]


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor, without the slow import of that class."""
    return hasattr(tensor, "_local_tensor")


def full_tensor_of(tensor: Tensor) -> Tensor:
    """Return the full tensor. **Collective** if it is sharded.

    Args:
        tensor: A tensor; a shard in host memory is moved to the device for the collective.

    Returns:
        The tensor itself if it is not sharded.
    """
    if not is_sharded(tensor):
        return tensor
    on_device = cast("DTensor", tensor.to(tensor.device_mesh.device_type))
    full: Tensor = on_device.full_tensor()
    return full


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
