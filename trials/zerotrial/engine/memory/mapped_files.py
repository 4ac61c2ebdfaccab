"""Tensors whose memory is a file, so that they take room only while they are used.

A file is mapped, and the system brings its pages in when they are touched. They count as this
process's memory until :func:`release`, which gives them up at once: what was changed is written to
the disk by the system, in its own time, or is kept in its cache for as long as there is room to
spare. :func:`read_ahead` has pages read before they are needed.
"""

from __future__ import annotations

import errno
import logging
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
from zerolab.linux import is_in_memory
from zerotrial.engine.memory.heap import return_freed_memory

__all__ = ["FileMemory", "is_in_file", "model_in_files", "read_ahead", "release", "warn_of_memory"]

logger = logging.getLogger(__name__)

_ARENA = 64 << 20  # bytes: files are this large, or as large as the tensor
_PAGE = mmap.PAGESIZE


class _Arena:
    """One file without a name, mapped."""

    def __init__(self, memory: mmap.mmap) -> None:
        first: Any = torch.frombuffer(memory, dtype=torch.uint8, count=1)
        self.begin = first.data_ptr()
        self.end = self.begin + len(memory)
        self.memory = weakref.ref(memory)  # tensors keep it, and the file, alive


_arenas: list[_Arena] = []


class FileMemory:
    """Room for tensors in files that vanish with the process.

    Args:
        directory: Where they are, e.g. on an NVMe disk.
        key: Of the configuration, for what is said when there is no room.
    """

    def __init__(self, directory: Path, key: str = "offload_param.nvme_path") -> None:
        self.directory = directory
        self.nbytes = 0
        """Taken so far, tensors that are gone included."""
        self._key = key
        self._memory: mmap.mmap | None = None
        self._used = 0
        self._mapped = False

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make a tensor of zeros.

        Args:
            numel: Elements; it has one dimension.
            dtype: Of the elements.

        Raises:
            EngineError: If the disk has no room, or no file can be made there.
        """
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        room = -(-nbytes // _PAGE) * _PAGE
        if self._memory is None or self._used + room > len(self._memory):
            self._memory, self._used = self._map(max(room, _ARENA)), 0
        found = torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=self._used)
        self._used += room
        self.nbytes += room
        return found

    def copy(self, tensor: Tensor) -> Tensor:
        """Make a tensor of the same values, shape and type; contiguous."""
        flat = self.allocate(tensor.numel(), tensor.dtype)
        found = flat.view(tensor.shape)
        found.copy_(tensor.detach())
        release(found)
        return found

    def _map(self, nbytes: int) -> mmap.mmap:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is found now
                memory = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                room = f"has no room for {nbytes:,} bytes on top of {self.nbytes:,} ({why})"
                problem = f"{self.directory} {room}; choose a larger disk"
            else:
                must = "must be a directory in which files can be made"
                problem = f"{must}, got {self.directory} ({why})"
            raise EngineError(f"{self._key}: {problem}") from error
        if not self._mapped:
            warn_of_memory(self.directory, self._key)
        self._mapped = True
        _arenas[:] = [arena for arena in _arenas if arena.memory() is not None]
        _arenas.append(_Arena(memory))
        return memory


def warn_of_memory(directory: Path, key: str) -> None:
    """Say so where what is to leave the memory stays in it.

    Args:
        directory: That is there.
        key: Of the configuration.
    """
    if is_in_memory(directory):
        text = "%s: %s is a file system in memory (tmpfs): what is offloaded there frees nothing"
        logger.warning(text, key, directory)


def is_in_file(tensor: Tensor) -> bool:
    """Whether a tensor's memory is a file of a :class:`FileMemory`."""
    return _place_of(tensor) is not None


def release(tensor: Tensor) -> None:
    """Take a tensor's pages out of this process's memory; its values stay.

    Args:
        tensor: Contiguous; one that is not in a file is left alone.
    """
    _advise(tensor, mmap.MADV_DONTNEED)


def read_ahead(tensor: Tensor) -> None:
    """Have a tensor's pages read while something else runs.

    Args:
        tensor: As for :func:`release`.
    """
    _advise(tensor, mmap.MADV_WILLNEED)


def _advise(tensor: Tensor, advice: int) -> None:
    found = _place_of(tensor)
    if found is None or tensor.numel() == 0:
        return
    memory, offset = found
    first = offset // _PAGE * _PAGE
    memory.madvise(advice, first, min(offset + tensor.nbytes, len(memory)) - first)


def _place_of(tensor: Tensor) -> tuple[mmap.mmap, int] | None:
    """The file of a tensor, and where in it the tensor begins, in bytes."""
    if not _arenas or tensor.device.type != "cpu":
        return None
    address = tensor.data_ptr()
    for arena in _arenas:
        if arena.begin <= address < arena.end and (memory := arena.memory()) is not None:
            return memory, address - arena.begin
    return None


@contextmanager
def model_in_files(directory: Path | str) -> Iterator[None]:
    """Have the parameters of modules that are made inside lie in files.

    So a model can be built that is larger than the memory: one parameter at a time is in it. To be
    trained with ``offload_param: {device: nvme}``, which takes the parameters over one by one.

    Args:
        directory: Where the files are; they have no names, and vanish with the model.

    Yields:
        Nothing.

    Raises:
        EngineError: If the disk has no room.
    """
    return_freed_memory()
    files = FileMemory(Path(directory), "model_in_files()")
    modules: Any = nn.Module
    register = modules.register_parameter
    open_module: nn.Module | None = None
    made: list[Tensor] = []

    def register_in_file(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal open_module
        if module is not open_module:
            for value in made:  # by now they are initialised
                release(value)
            made.clear()
        open_module = module
        if param is not None and param.device.type == "cpu" and not is_in_file(param):
            param.data = files.copy(param.data)
            made.append(param.data)
        register(module, name, param)

    modules.register_parameter = register_in_file
    try:
        yield
    finally:
        modules.register_parameter = register
        for arena in _arenas:
            if (memory := arena.memory()) is not None:
                memory.madvise(mmap.MADV_DONTNEED)
