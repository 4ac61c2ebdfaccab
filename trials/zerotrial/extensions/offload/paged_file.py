"""Tensors in a file: room is reserved first; two threads read ahead and write behind."""

import logging
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerolab.errors import EngineError
from zerotrial.engine.memory.heap import warn_of_memory

__all__ = ["OffloadError", "PagedFile"]

logger = logging.getLogger(__name__)

_ALIGN = 4096  # bytes; records begin on a page
_MOST_FREE = 8  # number of cached memory pieces


class OffloadError(EngineError):
    """Error of states in files; the text contains the directory and the bytes."""


class PagedFile:
    """Records of fixed size in an unnamed file, which disappears with the process.

    Args:
        directory: Directory of the file, e.g. on an NVMe disk.

    Raises:
        OffloadError: If no file can be created there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            msg = f"offload_optimizer.nvme_path: {directory}: {error.strerror or error}"
            raise OffloadError(msg) from error
        warn_of_memory(directory, "offload_optimizer.nvme_path")
        self._end = 0
        self._reader = ThreadPoolExecutor(1, "offload-read")
        self._writer = ThreadPoolExecutor(1, "offload-write")
        self._largest = 0  # of all records, bytes
        self._free: list[Tensor] = []
        self._in_use: dict[int, Tensor] = {}
        """Acquired memory by address."""

    def reserve(self, nbytes: int) -> int:
        """Reserve room for a record, so that a full disk is noticed before training.

        Returns:
            Offset of the record, in bytes.

        Raises:
            OffloadError: If the disk has too little room.
        """
        offset = self._end
        room = -(-nbytes // _ALIGN) * _ALIGN
        try:
            if room:  # a rank may have no part of a bucket
                os.posix_fallocate(self._file.fileno(), offset, room)
        except OSError as error:
            free = self._free_bytes()
            msg = (
                f"offload_optimizer.nvme_path: {self.directory} has no room for {nbytes:,} bytes "
                f"of optimizer states on top of {offset:,} ({error.strerror}; {free:,} bytes are "
                "free); choose a larger disk, or offload to cpu"
            )
            raise OffloadError(msg) from error
        self._end = offset + room
        self._largest = max(self._largest, nbytes)
        return offset

    def read(self, offset: int, out: Tensor) -> "Future[Tensor]":
        """Start filling ``out``, a contiguous CPU tensor, which the future returns."""
        return self._reader.submit(self._read, offset, out)

    def write(self, offset: int, tensor: Tensor) -> "Future[Tensor]":
        """Start writing ``tensor``, contiguous and on CPU, which the future returns."""
        return self._writer.submit(self._write, offset, tensor)

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a record; reused after :meth:`release`.

        All pieces are as large as the largest record, so that each fits any record, and there are
        than are in use at once. Records of less than half that size get memory that is not reused.
        """
        nbytes = numel * dtype.itemsize
        if 2 * nbytes < self._largest:
            return torch.empty(numel, dtype=dtype)
        fitting = [position for position, piece in enumerate(self._free) if piece.numel() >= nbytes]
        if fitting:
            piece = self._free.pop(fitting[-1])
        else:
            piece = torch.empty(max(nbytes, self._largest), dtype=torch.uint8)
        self._in_use[piece.data_ptr()] = piece
        return piece[:nbytes].view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Return memory of :meth:`acquire`; ignore other tensors."""
        piece = self._in_use.pop(tensor.data_ptr(), None)
        if piece is not None and len(self._free) < _MOST_FREE:
            self._free.append(piece)

    @property
    def free_memory(self) -> Sequence[Tensor]:
        """Memory available for reuse."""
        return self._free

    def close(self) -> None:
        """Remove the file."""
        self._reader.shutdown()
        self._writer.shutdown()
        self._file.close()
        self._free.clear()
        self._in_use.clear()

    def _read(self, offset: int, out: Tensor) -> Tensor:
        view = _bytes_of(out)
        done = 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if count == 0:
                msg = f"{self.directory}: the file of optimizer states ends too early"
                raise OffloadError(msg)
            done += count
        return out

    def _write(self, offset: int, tensor: Tensor) -> Tensor:
        view = _bytes_of(tensor)
        done = 0
        try:
            while done < len(view):
                done += os.pwritev(self._file.fileno(), [view[done:]], offset + done)
        except OSError as error:
            msg = (
                f"offload_optimizer.nvme_path: {self.directory}: could not write "
                f"{len(view) - done:,} of {len(view):,} bytes of optimizer states: {error.strerror}"
            )
            raise OffloadError(msg) from error
        return tensor

    def _free_bytes(self) -> int:
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
