"""Interface of object stores, and progress of their transfers."""

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from zerolab.errors import StorageError
from zerolab.formatting import size_text

__all__ = ["FileRecord", "ObjectStore", "StorageRefusedError", "TransferProgress", "file_hash"]


class StorageRefusedError(StorageError):
    """Access denied, or a missing bucket: retrying cannot help."""


class FileRecord(msgspec.Struct, frozen=True):
    """Size and hash of one file of a checkpoint."""

    size: int
    """Size in bytes."""
    hash: str
    """BLAKE2b hash of 16 bytes in hexadecimal digits; empty if it was not computed."""


def file_hash(path: Path) -> str:
    """Return the hash of a file's content, in the form of :class:`FileRecord`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class ObjectStore(Protocol):
    """Objects below the root of an address; object names are relative to it.

    Every method raises :class:`~zerolab.errors.StorageError` when the store fails. Methods are
    called from several threads and processes.
    """

    def read(self, name: str) -> bytes:
        """Return the content of a small object; raise NotFoundError if it does not exist."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a small object; readers see all of it or nothing."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; missing ones are ignored."""
        ...

    def children(self) -> list[str]:
        """Return the names directly below the root: objects, and folders that have objects."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove every object below a folder, which may not exist."""
        ...

    def upload(self, source: Path, name: str, progress: "TransferProgress") -> FileRecord:
        """Upload a file, which appears only when it is complete; return its size and hash."""
        ...

    def download(
        self, name: str, target: Path, record: FileRecord, progress: "TransferProgress"
    ) -> None:
        """Download a file, check it against its record, then move it to ``target``.

        Raises:
            NotFoundError: If it does not exist, or differs from the file that was saved.
        """
        ...

    def pieces(self, name: str, first: int, end: int) -> Iterator[bytes]:
        """Read an object from byte ``first`` up to ``end``, piece by piece.

        Raises:
            NotFoundError: If it does not exist, or is shorter than ``end``.
        """
        ...


logger = logging.getLogger(__name__)
_EVERY_S = 10.0


class TransferProgress:
    """Counter of a transfer's bytes that logs progress; short transfers log nothing.

    Args:
        what: Description of the transfer, e.g. ``checkpoint 1234: uploading``.
        total: Number of bytes to transfer.
        tell: Receives the lines; the module's logger by default.
        every_s: Seconds between two lines.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        description: str,
        total: int,
        *,
        report: Callable[[str], None] = logger.info,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._description = description
        self._total = total
        self._report = report
        self._every_s = every_s
        self._clock = clock
        self._started = self._last_report = clock()
        self._done = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def file(self) -> Iterator[Callable[[int], None]]:
        """Yield a callback that counts the bytes of one file; a failed block takes them back."""
        counted = 0

        def report(count: int) -> None:
            nonlocal counted
            counted += count
            self._add(count)

        try:
            yield report
        except BaseException:
            self._add(-counted)
            raise

    def end(self) -> None:
        """Log the duration if any progress was logged before."""
        if self._last_report > self._started:
            took = self._clock() - self._started
            self._report(f"{self._description}: {size_text(self._total)} in {took:.0f} s")

    def _add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = self._clock()
            if now - self._last_report < self._every_s:
                return
            self._last_report = now
            done = self._done
        share = 100 * done / self._total if self._total else 100.0
        self._report(
            f"{self._description}: {size_text(done)} of {size_text(self._total)} ({share:.0f} %)"
        )
