"""Tensors in mapped files, which take memory only while they are used.

The system reads the pages of a mapped file on access. They count as this process's memory until
:func:`release`, which drops them at once. The system writes changed pages to disk later, or caches
them while memory is free. :func:`read_ahead` reads pages before they are needed.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import EngineError
from zerotrial.engine.memory.heap import return_freed_memory, warn_of_memory
from zerotrial.engine.protocols import ShardMemory

__all__ = ["FileMemory", "is_in_file", "model_in_files", "read_ahead", "release"]

_ARENA = 64 << 20  # bytes: files are this large, or as large as the tensor
_PAGE = mmap.PAGESIZE


class _Arena:
    """One unnamed mapped file."""

    def __init__(self, memory: mmap.mmap) -> None:
        first: Any = torch.frombuffer(memory, dtype=torch.uint8, count=1)
        self.begin = first.data_ptr()
        self.end = self.begin + len(memory)
        self.memory = weakref.ref(memory)  # tensors keep it, and the file, alive


_arenas: list[_Arena] = []


class FileMemory(ShardMemory):
    """Allocator of tensors in files that disappear with the process.

    Args:
        directory: Directory of the files, e.g. on an NVMe disk.
        key: Configuration key for errors about missing room.
    """

    in_files = True

    def __init__(self, directory: Path, key: str = "offload_param.nvme_path") -> None:
        self.directory = directory
        self.nbytes = 0
        """Bytes allocated so far, including those of freed tensors."""
        self._key = key
        self._memory: mmap.mmap | None = None
        self._used = 0
        self._mapped = False

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a one-dimensional tensor of zeros.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.

        Raises:
            EngineError: If the disk has no room, or the file cannot be created.
        """
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        room = -(-nbytes // _PAGE) * _PAGE
        if self._memory is None or self._used + room > len(self._memory):
            self._memory, self._used = self._map(max(room, _ARENA)), 0
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=self._used)
        self._used += room
        self.nbytes += room
        return tensor

    def allocate_like(self, numel: int, like: Tensor) -> Tensor:
        """Allocate zeros with the type of another tensor."""
        return self.allocate(numel, like.dtype)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor in a file."""
        flat = self.allocate_like(tensor.numel(), tensor)
        copy = flat.view(tensor.shape)
        copy.copy_(tensor.detach())
        release(copy)
        return copy

    def release(self, tensor: Tensor) -> None:
        """Drop a tensor's pages from this process's memory; its values are kept."""
        release(tensor)

    def contains(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in a file."""
        return is_in_file(tensor)

    def _map(self, nbytes: int) -> mmap.mmap:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # fail now if the disk is full
                memory = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                room = f"has no room for {nbytes:,} bytes on top of {self.nbytes:,} ({reason})"
                problem = f"{self.directory} {room}; choose a larger disk"
            else:
                must = "must be a directory in which files can be made"
                problem = f"{must}, got {self.directory} ({reason})"
            raise EngineError(f"{self._key}: {problem}") from error
        if not self._mapped:
            warn_of_memory(self.directory, self._key)
        self._mapped = True
        _arenas[:] = [arena for arena in _arenas if arena.memory() is not None]
        _arenas.append(_Arena(memory))
        return memory


def is_in_file(tensor: Tensor) -> bool:
    """Return whether a tensor is in a file of a :class:`FileMemory`."""
    return _location_of(tensor) is not None


def release(tensor: Tensor) -> None:
    """Drop a tensor's pages from this process's memory; its values are kept.

    Args:
        tensor: Contiguous tensor; ignored if it is not in a file.
    """
    _advise(tensor, mmap.MADV_DONTNEED)


def read_ahead(tensor: Tensor) -> None:
    """Start reading a tensor's pages in the background.

    Args:
        tensor: Contiguous tensor; ignored if it is not in a file.
    """
    _advise(tensor, mmap.MADV_WILLNEED)


def _advise(tensor: Tensor, advice: int) -> None:
    location = _location_of(tensor)
    if location is None or tensor.numel() == 0:
        return
    memory, offset = location
    first = offset // _PAGE * _PAGE
    memory.madvise(advice, first, min(offset + tensor.nbytes, len(memory)) - first)


def _location_of(tensor: Tensor) -> tuple[mmap.mmap, int] | None:
    """Return the file of a tensor, and the tensor's offset in it, in bytes."""
    if not _arenas or tensor.device.type != "cpu":
        return None
    address = tensor.data_ptr()
    for arena in _arenas:
        if arena.begin <= address < arena.end and (memory := arena.memory()) is not None:
            return memory, address - arena.begin
    return None


@contextmanager
def model_in_files(directory: Path | str) -> Iterator[None]:
    """Put the parameters of modules created in the block into files.

    So a model larger than the memory can be built, with one parameter at a time in memory. Train it
    with ``offload_param: {device: nvme}``, which takes the parameters over one by one.

    Args:
        directory: Directory of the unnamed files, which disappear with the model.

    Yields:
        Nothing.

    Raises:
        EngineError: If the disk has no room.

    Example:
        >>> from zerotrial.engine import model_in_files
        >>> with model_in_files("."):
        ...     model = torch.nn.Linear(4, 1)
    """
    return_freed_memory()
    files = FileMemory(Path(directory), "model_in_files()")
    modules: Any = nn.Module
    register = modules.register_parameter
    open_module: nn.Module | None = None
    created: list[Tensor] = []

    def register_in_file(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal open_module
        if module is not open_module:
            for value in created:  # initialized by now
                release(value)
            created.clear()
        open_module = module
        if param is not None and param.device.type == "cpu" and not is_in_file(param):
            param.data = files.copy(param.data)
            created.append(param.data)
        register(module, name, param)

    modules.register_parameter = register_in_file
    try:
        yield
    finally:
        modules.register_parameter = register
        for arena in _arenas:
            if (memory := arena.memory()) is not None:
                memory.madvise(mmap.MADV_DONTNEED)
