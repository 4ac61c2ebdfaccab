"""An object store as checkpoints use it: few calls, each tried again, each failing in our words."""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError, NotFoundError, StorageError
from zerolab.storage.faults import StorageRefusedError, opening_error, storage_error
from zerolab.storage.opening import open_remote
from zerolab.storage.parts import LARGE, PartsUpload, abort_uploads
from zerolab.storage.progress import TransferProgress

__all__ = ["FileRecord", "ObjectStore", "file_hash"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSES_S = (0.5, 2.0, 5.0)
"""Between the tries of one transfer; the libraries below try each request again themselves."""
_PIECE = 8 * 1024**2
"""Bytes of a download that are asked for at a time."""
_BUCKETS = ("s3", "gs", "az")
"""Know no directories; told to make one, they would make a bucket that is missing."""


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    size: int
    """In bytes."""
    hash: str
    """BLAKE2b of 16 bytes, in hexadecimal digits; empty where none was taken."""


def file_hash(path: Path) -> str:
    """Return the hash of a file's content, as a :class:`FileRecord` has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class ObjectStore:
    """Objects below the root of an address; names are relative to it.

    Every method raises :class:`~zerolab.errors.StorageError` when the store does not do its part.

    Args:
        address: Of the storage.
    """

    def __init__(self, address: StorageAddress) -> None:
        self.address = address
        try:
            self._files, self._root = open_remote(address)
        except ConfigError:  # its package is missing
            raise
        except ValueError as error:  # what the file says makes no sense to the library
            raise opening_error(address, error) from error

    def read(self, name: str) -> bytes:
        """Return the content of a small object.

        Raises:
            NotFoundError: If there is none.
        """
        with self._guarded("cannot be read"):
            try:
                content: bytes = self._files.cat_file(self._path(name))
            except FileNotFoundError as error:
                self._check_bucket(error)
                msg = f"there is no {name} in {self.address.root}"
                raise NotFoundError(msg) from None
            return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        with self._guarded("cannot be written"):
            self._files.pipe_file(self._path(name), content)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are no matter."""
        for name in names:
            with self._guarded("cannot be deleted from"), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

    def children(self) -> list[str]:
        """Return the names directly below the root: of objects, and of what is like a directory."""
        with self._guarded("cannot be listed"):
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError as error:
                self._check_bucket(error)
                return []
            return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name, relative to ``folder``, and size of every object below it."""
        base = self._path(folder)
        with self._guarded("cannot be listed"):
            try:
                found = self._files.find(base, detail=True)
            except FileNotFoundError:
                return {}
            return {
                str(path).removeprefix(f"{base}/"): int(info["size"])
                for path, info in found.items()
                if info["type"] == "file" and str(path) != base
            }

    def remove_folder(self, folder: str) -> None:
        """Remove every object below a folder, and what uploads that were cut off have left."""
        with self._guarded("cannot be deleted from"):
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._path(folder), recursive=True)
            if self.address.scheme == "s3":
                abort_uploads(self._files, self._path(folder))

    def upload(self, source: Path, name: str, progress: TransferProgress) -> FileRecord:
        """Bring a file up, and see that it has arrived whole.

        What has arrived in an attempt that failed is not sent again: of a large file in S3 its
        parts, of any in a bucket the whole, where only the answer was lost.
        """
        record = FileRecord(source.stat().st_size, file_hash(source))
        path = self._path(name)
        is_large = self.address.scheme == "s3" and record.size >= LARGE
        parts = PartsUpload(self._files, path, source) if is_large else None
        tried = False

        def attempt() -> None:
            nonlocal tried
            again, tried = tried and self.address.scheme in _BUCKETS, True
            with self._guarded("cannot be written"), progress.file() as told:
                if again and self._arrived(path) == record.size:  # no object is there in part
                    told(record.size)
                    return
                if parts is not None:
                    parts.attempt(told)
                else:
                    self._put(source, path, told)
                arrived = self._arrived(path)
                if arrived != record.size:
                    msg = f"{path} has {arrived or 0} bytes there instead of {record.size}"
                    raise StorageError(msg)

        try:
            self._again(attempt)
        except StorageError:
            if parts is not None:
                parts.abort()
            raise
        return record

    def _put(self, source: Path, path: str, told: Callable[[int], None]) -> None:
        if self.address.scheme not in _BUCKETS:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(source), path, callback=_callback(told))

    def _arrived(self, path: str) -> int | None:
        """Bytes of what is at a path; None where nothing is."""
        try:
            return int(self._files.info(path)["size"])
        except FileNotFoundError:
            return None

    def download(
        self, name: str, target: Path, record: FileRecord, progress: TransferProgress
    ) -> None:
        """Bring a file down; go on where an earlier download of it has stopped.

        Raises:
            NotFoundError: If it is not there, or not what was saved.
        """
        part = target.with_name(f"{target.name}.part")
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

        def attempt() -> None:
            with part.open("ab") as file, progress.file() as told:
                told(file.tell())
                for piece in self.pieces(name, file.tell(), record.size):
                    file.write(piece)
                    told(len(piece))

        for last in (False, True):
            if part.exists() and part.stat().st_size > record.size:
                part.unlink()
            self._again(attempt)
            if not record.hash or file_hash(part) == record.hash:
                part.replace(target)
                return
            part.unlink()  # of another content; what is there is read once more from its beginning
            if last:
                msg = f"{self.address.at(name)} is damaged: its content is not what was saved"
                raise NotFoundError(f"{msg}; go on from an earlier checkpoint")

    def pieces(self, name: str, first: int, end: int) -> Iterator[bytes]:
        """Read an object from byte ``first`` up to ``end``, piece by piece.

        Raises:
            NotFoundError: If it is not there, or ends before.
        """
        place = first
        while place < end:
            until = min(place + _PIECE, end)
            with self._guarded("cannot be read"):
                try:
                    piece: bytes = self._files.cat_file(self._path(name), start=place, end=until)
                except FileNotFoundError as error:
                    self._check_bucket(error)
                    piece = b""
            if len(piece) != until - place:
                msg = f"{self.address.at(name)} is missing, or shorter than its {end} bytes"
                raise NotFoundError(f"{msg}; go on from an earlier checkpoint")
            yield piece
            place = until

    def probe(self, name: str, content: bytes) -> None:
        """Write an object and remove it again."""
        self.write(name, content)
        self.remove([name])

    def _again(self, attempt: Callable[[], T]) -> T:
        for pause_s in _PAUSES_S:
            try:
                return attempt()
            except StorageRefusedError:
                raise
            except StorageError as error:
                logger.warning("%s; again in %g s", error, pause_s)
                time.sleep(pause_s)
        return attempt()

    def _check_bucket(self, error: FileNotFoundError) -> None:
        """Tell a bucket that is not there from an object that is not."""
        failure = storage_error(self.address, error, "cannot be read")
        if isinstance(failure, StorageRefusedError):
            raise failure from error

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """Say of whatever a library raises that it is the storage that failed."""
        try:
            yield
        except (NotFoundError, StorageError):
            raise
        except Exception as error:  # libraries raise what they like
            raise storage_error(self.address, error, doing) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _callback(told: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    class Telling(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            told(inc)

    return Telling()
