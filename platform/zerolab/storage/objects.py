"""Interface of object stores, which storage backends implement."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from zerolab.errors import StorageError
from zerolab.storage.progress import TransferProgress

__all__ = ["FileRecord", "ObjectStore", "StorageRefusedError", "file_hash"]


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

    def upload(self, source: Path, name: str, progress: TransferProgress) -> FileRecord:
        """Upload a file, which appears only when it is complete; return its size and hash."""
        ...

    def download(
        self, name: str, target: Path, record: FileRecord, progress: TransferProgress
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
