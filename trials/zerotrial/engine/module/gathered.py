"""The whole value of a tensor of which each rank may keep a part."""

from typing import TYPE_CHECKING, TypeGuard, cast

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_sharded", "whole_of"]


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor; importing that class takes most of a second, at every stage."""
    return hasattr(tensor, "_local_tensor")


def whole_of(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is sharded. **Collective** then.

    Args:
        tensor: Its part may lie in host memory, where the ranks' GPUs cannot gather it.

    Returns:
        The tensor itself where it is whole.
    """
    if not is_sharded(tensor):
        return tensor
    here = cast("DTensor", tensor.to(tensor.device_mesh.device_type))
    whole: Tensor = here.full_tensor()
    return whole
