"""Tensors that lie in memory of another process, or in a file, until this one writes to them.

The pages are mapped copy-on-write: to read takes no memory of this process, and what it writes is
its own, and seen by nobody else.
"""

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["borrow", "borrow_from_disk", "is_lent"]

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


def borrow_from_disk(tensor: Tensor, directory: Path) -> Tensor:
    """Return a tensor's values in a file without a name, which takes no memory of this process.

    The system keeps its pages for as long as there is room to spare.

    Args:
        tensor: On the CPU, of any shape; it is left as it is.
        directory: Where the file is made, which goes when the tensor does.

    Raises:
        OSError: If none can be made there, or there is no room.
    """
    if tensor.numel() == 0:
        return tensor.detach().clone()
    values = tensor.detach().contiguous().reshape(-1)
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, values.nbytes)  # a full disk is found now
        file.write(values.view(torch.uint8).numpy().data)
        file.flush()
        return borrow(file.fileno(), tensor.shape, tensor.dtype)


def is_lent(tensor: Tensor) -> bool:
    """Whether a tensor's memory is one that this module has mapped."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().data_ptr() in _maps
