"""Full values of tensors that may be sharded."""

from typing import TYPE_CHECKING, TypeGuard, cast

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["full_tensor_of", "is_sharded"]


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
