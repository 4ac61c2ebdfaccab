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
    """Store of objects below the root of an address.

    Object names are relative to the root, such as ``UUID/files/model.pt``. Every method raises
    :class:`~zerolab.errors.StorageError` when the store fails. Methods are called from several
    threads and processes.

    Example:
        >>> from pathlib import Path
        >>> class Folder:
        ...     def __init__(self, root):
        ...         self.root = Path(root)
        ...     def read(self, name):
        ...         try:
        ...             return (self.root / name).read_bytes()
        ...         except FileNotFoundError:
        ...             raise zerolab.errors.NotFoundError(f"no object {name}") from None
        ...     def write(self, name, content):
        ...         path = self.root / name
        ...         path.parent.mkdir(parents=True, exist_ok=True)
        ...         part = path.with_name(f"{path.name}.part")
        ...         part.write_bytes(content)
        ...         part.replace(path)
        >>> store = Folder("objects")
        >>> store.write("notes/first", b"text")
        >>> store.read("notes/first")
        b'text'
    """

    def read(self, name: str) -> bytes:
        """Return the content of a small object.

        Args:
            name: Name of the object.

        Returns:
            Its content.

        Raises:
            NotFoundError: If it does not exist.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a small object; readers see all of it or nothing.

        Args:
            name: Name of the object.
            content: Its content.
        """
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; missing ones are ignored.

        Args:
            names: Names of the objects.
        """
        ...

    def children(self) -> list[str]:
        """Return the names directly below the root.

        Returns:
            Names of objects, and of folders that have objects.
        """
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove every object below a folder, which may not exist.

        Args:
            folder: Name of the folder.
        """
        ...

    def upload(self, source: Path, name: str, progress: "TransferProgress") -> FileRecord:
        """Upload a file, which appears only when it is complete.

        Args:
            source: The file.
            name: Name of the object.
            progress: Counter of the transferred bytes.

        Returns:
            Size and hash of the file.
        """
        ...

    def download(
        self, name: str, target: Path, record: FileRecord, progress: "TransferProgress"
    ) -> None:
        """Download a file and check it against its record.

        The file is moved to ``target`` when it is complete and correct.

        Args:
            name: Name of the object.
            target: Path of the file.
            record: Size and hash of the saved file.
            progress: Counter of the transferred bytes.

        Raises:
            NotFoundError: If it does not exist, or differs from the file that was saved.
        """
        ...

    def pieces(self, name: str, first: int, end: int) -> Iterator[bytes]:
        """Read a range of an object, piece by piece.

        Args:
            name: Name of the object.
            first: First byte.
            end: Byte after the last one.

        Yields:
            Bytes of the range, in order.

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
