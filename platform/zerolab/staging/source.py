"""What is staged: a file, a folder, or whatever fsspec reads; its files, and their bytes."""

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
from zerolab.storage.faults import StorageRefusedError, storage_error
from zerolab.storage.objects import retried
from zerolab.storage.opening import missing_package, open_remote

__all__ = ["DataRefusedError", "Source", "SourceFile", "open_source"]

KEY = "data.stage.from"

_PIECE = 8 * 1024**2
"""Bytes that are read at a time."""
_STAMPS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "versionId")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class DataRefusedError(ZerolabError):
    """The data cannot be staged as the experiment says: trying again is no help."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source."""

    size: int
    """In bytes."""
    stamp: str
    """Another one when the content is: a hash that the store keeps, or the time of the change."""
    mtime_ns: int | None
    """Time of the last change, in nanoseconds since 1970, where it is known."""


class Source(Protocol):
    """Files by their names, relative and with slashes."""

    def listing(self) -> dict[str, SourceFile]:
        """Find all files; a source that is one file has its own name.

        Raises:
            DataRefusedError: If there is nothing, or something that cannot be read.
            StorageError: If it may be there later.
        """
        ...

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Read a file of so many bytes; raises as :meth:`listing`."""
        ...


def open_source(place: str) -> Source:
    """Return what stands at an absolute path or at a URL.

    Raises:
        DataRefusedError: If this machine has nothing that reads such URLs.
    """
    address = StorageAddress(root=place)
    return _Remote(address) if address.is_remote else _Local(place.removeprefix("file://"))


class _Local:
    def __init__(self, place: str) -> None:
        self._root = Path(place)
        self._is_file = False

    def listing(self) -> dict[str, SourceFile]:
        with _refusing(self._root):
            self._is_file = not stat.S_ISDIR(self._root.stat().st_mode)
        if self._is_file:
            return {self._root.name: self._look(self._root)}
        found = dict(self._walk(self._root, "", ()))
        if not found:  # as what a share is mounted on: a copy that there is would be emptied
            text = (
                f"{KEY}: there is no file in {self._root}; mend the path, or mount what it is for"
            )
            raise DataRefusedError(text)
        return found

    def _walk(
        self, folder: Path, prefix: str, above: tuple[tuple[int, int], ...]
    ) -> Iterator[tuple[str, SourceFile]]:
        with _refusing(folder):
            found = folder.stat()
            me = (found.st_dev, found.st_ino)
            if me in above:
                raise DataRefusedError(f"{KEY}: {folder} leads back to a folder above itself")
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        for entry in entries:
            path, name = Path(entry.path), f"{prefix}{entry.name}"
            if not is_text(entry.name):
                raise DataRefusedError(
                    f"{KEY}: {str(path)!r} has a name that is no UTF-8; rename it"
                )
            if entry.is_dir():
                yield from self._walk(path, f"{name}/", (*above, me))
            else:
                yield name, self._look(path)

    def _look(self, path: Path) -> SourceFile:
        with _refusing(path):
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise DataRefusedError(f"{KEY}: {path} is neither a file nor a folder")
        return SourceFile(found.st_size, str(found.st_mtime_ns), found.st_mtime_ns)

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        path = self._root if self._is_file else self._root / name
        with _refusing(path), path.open("rb") as file:
            left = size
            while piece := file.read(_PIECE):
                left -= len(piece)
                yield piece
        if left:
            raise StorageError(f"{KEY}: {path} has changed while it was copied")


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Say in one sentence what is wrong with a path of the source."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        text = f"{KEY}: there is no {path} on this machine; mend the path, or mount it here"
        raise DataRefusedError(text) from None
    except OSError as error:
        text = f"{KEY}: {path} cannot be read: {error.strerror or error}"
        raise (StorageError if is_storage_failure(error) else DataRefusedError)(text) from error


class _Remote:
    def __init__(self, address: StorageAddress) -> None:
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
            found: dict[str, Any] = self._files.find(self._root, detail=True)
        files = {str(path): info for path, info in found.items() if info["type"] == "file"}
        self._is_file = set(files) == {self._root}
        if not files:
            text = f"{KEY}: there is nothing at {self._address.root}; mend the address"
            raise DataRefusedError(text)
        return {self._name(path): _as_file(info) for path, info in files.items()}

    def _name(self, path: str) -> str:
        return path.rpartition("/")[2] if self._is_file else path.removeprefix(f"{self._root}/")

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
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
        try:
            yield
        except Exception as error:  # libraries raise what they like
            said = storage_error(self._address, error, "cannot be read", KEY)
            if isinstance(said, StorageRefusedError):
                raise DataRefusedError(str(said)) from error
            if isinstance(error, FileNotFoundError):
                text = f"{KEY}: there is nothing at {self._address.root}; mend the address"
                raise DataRefusedError(text) from error
            raise said from error


def _as_file(info: dict[str, Any]) -> SourceFile:
    times = (info[name] for name in _TIMES if info.get(name))
    mtime = next((found for value in times if (found := _nanoseconds(value)) is not None), None)
    stamp = next((str(info[name]) for name in _STAMPS if info.get(name)), str(mtime or ""))
    return SourceFile(int(info["size"]), stamp, mtime)


def _nanoseconds(value: object) -> int | None:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        value = value.timestamp()
    return int(value * 1e9) if isinstance(value, int | float) else None
