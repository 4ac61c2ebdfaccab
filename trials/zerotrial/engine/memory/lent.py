"""Tensors that lie in memory of another process, until this one writes to them.

The pages are mapped copy-on-write: to read takes no memory of this process, and what it writes is
its own, and seen by nobody else.
"""

import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["borrow", "is_lent"]

_maps: "weakref.WeakValueDictionary[int, mmap.mmap]" = weakref.WeakValueDictionary()
"""By the address at which they begin; tensors keep them alive."""


def borrow(fd: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of what a file holds.

    Args:
        fd: Of a file of memory; it may be closed afterwards, and must not be written to any more.
        shape: Of the tensor; with elements.
        dtype: Of the elements.
    """
    numel = math.prod(shape)
    memory = mmap.mmap(fd, numel * dtype.itemsize, access=mmap.ACCESS_COPY)
    found = torch.frombuffer(memory, dtype=dtype, count=numel)
    _maps[found.data_ptr()] = memory
    return found.view(tuple(shape))


def is_lent(tensor: Tensor) -> bool:
    """Whether a tensor's memory is one that :func:`borrow` has mapped."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().data_ptr() in _maps
