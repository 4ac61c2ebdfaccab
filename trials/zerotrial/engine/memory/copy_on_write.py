"""Tensors in another process's memory or in a file, mapped copy-on-write.

Reading them takes no memory of this process. Writes go to private pages, which no other process
sees.
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

__all__ = ["is_copy_on_write", "map_copy_on_write", "map_to_disk"]

_maps: "weakref.WeakValueDictionary[int, mmap.mmap]" = weakref.WeakValueDictionary()
"""Mappings by start address; tensors keep them alive."""


def map_copy_on_write(fd: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Map the content of a memory file as a tensor.

    Args:
        fd: Descriptor of the file; it may be closed afterwards, and must not change any more.
        shape: Shape of the tensor; not empty.
        dtype: Type of the elements.
    """
    numel = math.prod(shape)
    memory = mmap.mmap(fd, numel * dtype.itemsize, access=mmap.ACCESS_COPY)
    flat = torch.frombuffer(memory, dtype=dtype, count=numel)
    _maps[flat.data_ptr()] = memory
    return flat.view(tuple(shape))


def map_to_disk(tensor: Tensor, directory: Path) -> Tensor:
    """Copy a tensor to an unnamed file and map it, which takes no memory of this process.

    The system caches its pages while memory is free.

    Args:
        tensor: CPU tensor of any shape; it is not changed.
        directory: Directory of the file, which disappears with the tensor.

    Raises:
        OSError: If the file cannot be created, or there is no room.
    """
    if tensor.numel() == 0:
        return tensor.detach().clone()
    values = tensor.detach().contiguous().reshape(-1)
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, values.nbytes)  # fail now if the disk is full
        file.write(values.view(torch.uint8).numpy().data)
        file.flush()
        return map_copy_on_write(file.fileno(), tensor.shape, tensor.dtype)


def is_copy_on_write(tensor: Tensor) -> bool:
    """Return whether this module has mapped a tensor's memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().data_ptr() in _maps
