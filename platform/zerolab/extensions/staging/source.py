"""Sources of staged data: a file, a folder, or an fsspec URL."""

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from zerolab.contract.storage import StorageAddress
from zerolab.errors import StorageError, ZerolabError, is_storage_failure
from zerolab.schema.json_values import is_text
from zerolab.storage.objects import StorageRefusedError

__all__ = ["DataRefusedError", "Source", "SourceFile", "open_source"]

KEY = "data.stage.from"

_PIECE = 8 * 1024**2
"""Bytes per read."""
_STAMPS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "versionId")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class DataRefusedError(ZerolabError):
    """Data that cannot be staged with the experiment's settings: retrying cannot help."""


@dataclass(frozen=True)
class SourceFile:
    """Size, version and modification time of one file of a source."""

    size: int
    """Size in bytes."""
    stamp: str
    """Version of the content: a hash from the store, or the modification time."""
    mtime_ns: int | None
    """Modification time in nanoseconds since 1970, if known."""


class Source(Protocol):
    """Files by name; names are relative, with slashes."""

    def listing(self) -> dict[str, SourceFile]:
        """Return all files; a source that is a single file is listed under its own name.

        Raises:
            DataRefusedError: If it is empty, or something cannot be read.
            StorageError: If it may become available later.
        """
        ...

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Read a file of ``size`` bytes piece by piece; raises like :meth:`listing`."""
        ...


def open_source(root: str) -> Source:
    """Open the source at an absolute path or URL.

    Raises:
        DataRefusedError: If no installed package reads such URLs.
    """
    address = StorageAddress(root=root)
    return _Remote(address) if address.is_remote else _Local(root.removeprefix("file://"))


class _Local:
    def __init__(self, path: str) -> None:
        self._root = Path(path)
        self._is_file = False

    def listing(self) -> dict[str, SourceFile]:
        with _path_errors(self._root):
            self._is_file = not stat.S_ISDIR(self._root.stat().st_mode)
        if self._is_file:
            return {self._root.name: self._file_info(self._root)}
        entries = dict(self._walk(self._root, "", ()))
        if not entries:  # an unmounted share, say: an existing copy would be emptied
            text = f"{KEY}: there is no file in {self._root}; fix the path, or mount the share"
            raise DataRefusedError(text)
        return entries

    def _walk(
        self, folder: Path, prefix: str, ancestors: tuple[tuple[int, int], ...]
    ) -> Iterator[tuple[str, SourceFile]]:
        with _path_errors(folder):
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in ancestors:
                raise DataRefusedError(f"{KEY}: {folder} leads back to a folder above itself")
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        for entry in entries:
            path, name = Path(entry.path), f"{prefix}{entry.name}"
            if not is_text(entry.name):
                raise DataRefusedError(
                    f"{KEY}: {str(path)!r} has a name that is no UTF-8; rename it"
                )
            if entry.is_dir():
                yield from self._walk(path, f"{name}/", (*ancestors, identity))
            else:
                yield name, self._file_info(path)

    def _file_info(self, path: Path) -> SourceFile:
        with _path_errors(path):
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise DataRefusedError(f"{KEY}: {path} is neither a file nor a folder")
        return SourceFile(status.st_size, str(status.st_mtime_ns), status.st_mtime_ns)

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        path = self._root if self._is_file else self._root / name
        with _path_errors(path), path.open("rb") as file:
            remaining = size
            while piece := file.read(_PIECE):
                remaining -= len(piece)
                yield piece
        if remaining:
            raise StorageError(f"{KEY}: {path} has changed while it was copied")


@contextlib.contextmanager
def _path_errors(path: Path) -> Iterator[None]:
    """Convert errors of a source path into one sentence."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        text = f"{KEY}: there is no {path} on this machine; fix the path, or mount it here"
        raise DataRefusedError(text) from None
    except OSError as error:
        text = f"{KEY}: {path} cannot be read: {error.strerror or error}"
        raise (StorageError if is_storage_failure(error) else DataRefusedError)(text) from error


class _Remote:
    def __init__(self, address: StorageAddress) -> None:
        # Imported lazily: data in a directory needs no other extension.
        from zerolab.extensions.storage_objects.filesystem import missing_package, open_remote

        self._address = address
        missing = missing_package(address)
        if missing is not None:
            raise DataRefusedError(f"{KEY}: {missing}")
        try:
            self._files, self._root = open_remote(address)
        except (ImportError, ValueError) as error:
            text = f"{KEY}: {address.root} cannot be opened on this machine: {error}"
            raise DataRefusedError(text) from error
        self._is_file = False

    def listing(self) -> dict[str, SourceFile]:
        with self._guarded():
            infos: dict[str, Any] = self._files.find(self._root, detail=True)
        files = {str(path): info for path, info in infos.items() if info["type"] == "file"}
        self._is_file = set(files) == {self._root}
        if not files:
            text = f"{KEY}: there is nothing at {self._address.root}; fix the address"
            raise DataRefusedError(text)
        return {self._name(path): _as_file(info) for path, info in files.items()}

    def _name(self, path: str) -> str:
        return path.rpartition("/")[2] if self._is_file else path.removeprefix(f"{self._root}/")

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        from zerolab.extensions.storage_objects.object_store import retried

        path = self._root if self._is_file else f"{self._root}/{name}"
        for first in range(0, size, _PIECE):
            end = min(first + _PIECE, size)
            piece = retried(partial(self._piece, path, first, end))
            if len(piece) != end - first:
                text = f"{KEY}: {self._address.at(name)} has changed while it was copied"
                raise StorageError(text)
            yield piece

    def _piece(self, path: str, first: int, end: int) -> bytes:
        with self._guarded():
            piece: bytes = self._files.cat_file(path, start=first, end=end)
            return piece

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        from zerolab.extensions.storage_objects.faults import storage_error

        try:
            yield
        except Exception as error:  # libraries raise arbitrary exceptions
            failure = storage_error(self._address, error, "cannot be read", KEY)
            if isinstance(failure, StorageRefusedError):
                raise DataRefusedError(str(failure)) from error
            if isinstance(error, FileNotFoundError):
                text = f"{KEY}: there is nothing at {self._address.root}; fix the address"
                raise DataRefusedError(text) from error
            raise failure from error


def _as_file(info: dict[str, Any]) -> SourceFile:
    times = (info[name] for name in _TIMES if info.get(name))
    mtime = next((parsed for value in times if (parsed := _nanoseconds(value)) is not None), None)
    stamp = next((str(info[name]) for name in _STAMPS if info.get(name)), str(mtime or ""))
    return SourceFile(int(info["size"]), stamp, mtime)


def _nanoseconds(value: object) -> int | None:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        value = value.timestamp()
    return int(value * 1e9) if isinstance(value, int | float) else None
