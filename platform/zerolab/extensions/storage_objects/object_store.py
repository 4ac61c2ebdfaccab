"""Object store through fsspec: operations with retries and uniform errors."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError, NotFoundError, StorageError
from zerolab.extensions.storage_objects.faults import opening_error, storage_error
from zerolab.extensions.storage_objects.filesystem import open_remote
from zerolab.storage.objects import FileRecord, StorageRefusedError, TransferProgress, file_hash

__all__ = ["FsspecStore", "retried"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSES_S = (0.5, 2.0, 5.0)
"""Pauses between attempts of a transfer; the libraries retry single requests themselves."""
_PIECE = 8 * 1024**2
"""Size of a ranged read, in bytes."""
_PART = 50 * 1024**2
"""Part size of an S3 upload, in bytes; larger if a file would exceed S3's part limit."""
_MOST_PARTS = 10_000
_BUCKETS = ("s3", "gs", "az")
"""Schemes without directories: ``makedirs`` would create a missing bucket."""


def retried(attempt: Callable[[], T]) -> T:
    """Call a transfer until it succeeds, at most four times; denied access is not retried.

    Raises:
        StorageError: The error of the last attempt.
    """
    for pause_s in _PAUSES_S:
        try:
            return attempt()
        except StorageRefusedError:
            raise
        except StorageError as error:
            logger.warning("%s; retrying in %g s", error, pause_s)
            time.sleep(pause_s)
    return attempt()


class FsspecStore:
    """An :class:`~zerolab.storage.objects.ObjectStore` in a bucket, or at another fsspec URL.

    Args:
        address: Address of the storage.
    """

    def __init__(self, address: StorageAddress) -> None:
        self.address = address
        try:
            self._files, self._root = open_remote(address)
        except ConfigError:  # its package is missing
            raise
        except ValueError as error:  # the library rejects the options
            raise opening_error(address, error) from error

    def read(self, name: str) -> bytes:
        """Return the content of a small object.

        Raises:
            NotFoundError: If it does not exist.
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
        """Remove objects; missing ones are ignored."""
        for name in names:
            with self._guarded("cannot be deleted from"), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

    def children(self) -> list[str]:
        """Return the names directly below the root: objects and directory-like prefixes."""
        with self._guarded("cannot be listed"):
            try:
                paths = self._files.ls(self._root, detail=False)
            except FileNotFoundError as error:
                self._check_bucket(error)
                return []
            return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name, relative to ``folder``, and size of every object below it."""
        base = self._path(folder)
        with self._guarded("cannot be listed"):
            try:
                infos = self._files.find(base, detail=True)
            except FileNotFoundError:
                return {}
            return {
                str(path).removeprefix(f"{base}/"): int(info["size"])
                for path, info in infos.items()
                if info["type"] == "file" and str(path) != base
            }

    def remove_folder(self, folder: str) -> None:
        """Remove every object below a folder, and the parts of unfinished uploads."""
        with self._guarded("cannot be deleted from"):
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._path(folder), recursive=True)
            self._abort_uploads(f"{self._path(folder)}/")

    def upload(self, source: Path, name: str, progress: TransferProgress) -> FileRecord:
        """Upload a file and check the size of the object; transient failures are retried.

        The object appears only when it is complete: S3 receives a large file in parts and
        assembles the object at the end.
        """
        record = FileRecord(source.stat().st_size, file_hash(source))
        path = self._path(name)
        options: dict[str, int] = {}
        if self.address.scheme == "s3":
            options["chunksize"] = max(_PART, -(-record.size // _MOST_PARTS))
        elif self.address.scheme not in _BUCKETS:
            with self._guarded("cannot be written"):
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        retry = failed = False

        def attempt() -> None:
            nonlocal retry, failed
            with self._guarded("cannot be written"), progress.file() as count:
                # The previous attempt may have succeeded with only its response lost.
                complete = retry and self.address.scheme in _BUCKETS
                retry = True
                if complete and self._object_size(path) == record.size:
                    count(record.size)
                    return
                try:
                    self._files.put_file(str(source), path, callback=_callback(count), **options)
                except Exception:
                    failed = True
                    self._try_abort_uploads(path)
                    raise
                size = self._object_size(path)
                if size != record.size:
                    msg = f"{path} has {size or 0} bytes there instead of {record.size}"
                    raise StorageError(msg)

        try:
            retried(attempt)
        finally:
            if failed:  # the abort of the last attempt may have failed with it
                self._try_abort_uploads(path)
        return record

    def _try_abort_uploads(self, path: str) -> None:
        """Abort uploads and ignore errors; the sweep of the checkpoint aborts the rest."""
        with contextlib.suppress(Exception):
            self._abort_uploads(path)

    def _abort_uploads(self, path: str) -> None:
        """Abort unfinished uploads on S3, where their parts cost money.

        Args:
            path: Path of one object, or a prefix with a trailing slash for all objects below it.
        """
        if self.address.scheme != "s3":
            return
        bucket, _, key = path.partition("/")
        while True:
            page = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
            uploads = [
                {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                for upload in page.get("Uploads", ())
                if key.endswith("/") or upload["Key"] == key
            ]
            for upload in uploads:
                self._files.call_s3("abort_multipart_upload", Bucket=bucket, **upload)
            # S3 sorts by key: uploads of the object itself precede those with longer keys.
            if not (page.get("IsTruncated") and uploads):
                return

    def _object_size(self, path: str) -> int | None:
        """Return the size of an object; None if it does not exist."""
        try:
            return int(self._files.info(path)["size"])
        except FileNotFoundError:
            return None

    def download(
        self, name: str, target: Path, record: FileRecord, progress: TransferProgress
    ) -> None:
        """Download a file, check its size and hash, then move it to ``target``.

        Raises:
            NotFoundError: If it does not exist, or differs from the file that was saved.
        """
        part = target.with_name(f"{target.name}.part")
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

        def attempt() -> None:
            with self._guarded("cannot be read"), progress.file() as count:
                part.unlink(missing_ok=True)
                try:
                    path = self._path(name)
                    self._files.get_file(path, str(part), callback=_callback(count))
                except FileNotFoundError as error:
                    self._check_bucket(error)
                    raise self._incomplete(name, record.size) from None
                if part.stat().st_size < record.size:
                    raise self._incomplete(name, record.size)

        for last in (False, True):
            retried(attempt)
            intact = part.stat().st_size == record.size
            if intact and (not record.hash or file_hash(part) == record.hash):
                part.replace(target)
                return
            part.unlink()
            if last:
                msg = f"{self.address.at(name)} is damaged: its content differs from the saved file"
                raise NotFoundError(f"{msg}; resume from an earlier checkpoint")

    def pieces(self, name: str, first: int, end: int) -> Iterator[bytes]:
        """Read an object from byte ``first`` up to ``end``, piece by piece.

        Raises:
            NotFoundError: If it does not exist, or is shorter than ``end``.
        """
        position = first
        while position < end:
            stop = min(position + _PIECE, end)
            with self._guarded("cannot be read"):
                try:
                    piece: bytes = self._files.cat_file(self._path(name), start=position, end=stop)
                except FileNotFoundError as error:
                    self._check_bucket(error)
                    piece = b""
            if len(piece) != stop - position:
                raise self._incomplete(name, end)
            yield piece
            position = stop

    def _incomplete(self, name: str, size: int) -> NotFoundError:
        msg = f"{self.address.at(name)} is missing, or shorter than its {size} bytes"
        return NotFoundError(f"{msg}; resume from an earlier checkpoint")

    def _check_bucket(self, error: FileNotFoundError) -> None:
        """Raise if the bucket, not only the object, is missing."""
        failure = storage_error(self.address, error, "cannot be read")
        if isinstance(failure, StorageRefusedError):
            raise failure from error

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """Convert any exception of a library into a StorageError."""
        try:
            yield
        except (NotFoundError, StorageError):
            raise
        except Exception as error:  # libraries raise arbitrary exceptions
            raise storage_error(self.address, error, doing) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _callback(count: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    class Counter(Callback):  # type: ignore[misc]
        counted = 0

        def call(self, *_: Any, **__: Any) -> None:
            # Some libraries report increments, others absolute progress.
            count(self.value - self.counted)
            self.counted = self.value

    return Counter()
