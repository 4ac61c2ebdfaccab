"""Where complete checkpoints stand: in a directory, or in an object store; the same verbs."""

import contextlib
import errno
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from zerolab.contract.names import file_name_problem
from zerolab.contract.storage import StorageAddress
from zerolab.errors import NotFoundError
from zerolab.files import write_atomic
from zerolab.storage.objects import ObjectStore

__all__ = [
    "DESCRIPTION_FILE",
    "PARTIAL",
    "BucketShelf",
    "DirectoryShelf",
    "Shelf",
    "StoredCheckpoint",
    "path_inside",
]

logger = logging.getLogger(__name__)

DESCRIPTION_FILE = "checkpoint.json"
PARTIAL = ".partial"
_PIECE = 1 << 20


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What ``checkpoint.json`` says."""

    uuid: str
    steps_completed: int
    """Batches (optimizer steps) that it holds."""
    resources: dict[str, int]
    """Path inside the checkpoint to its size in bytes."""
    metadata: dict[str, object]
    created_at: str
    """ISO 8601, UTC."""
    hashes: dict[str, str] = {}
    """Path to the hash of its content (:class:`zerolab.storage.objects.FileRecord`), of what was
    uploaded."""

    def to_json(self) -> bytes:
        """Return the content of ``checkpoint.json``."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


class Shelf(Protocol):
    """What becomes of checkpoints that are complete, and of what was left of others."""

    def description(self, name: str) -> bytes:
        """Return the content of ``checkpoint.json``; raise NotFoundError if there is none."""
        ...

    def names(self) -> list[str]:
        """Return what stands on it, checkpoints and other things."""
        ...

    def check(self, stored: StoredCheckpoint) -> None:
        """Raise NotFoundError if a file is missing or has another size."""
        ...

    def delete(self, name: str, trash: Path) -> None:
        """Remove a checkpoint; one that is not there is no matter."""
        ...

    def remove_files(self, stored: StoredCheckpoint, names: Sequence[str]) -> None:
        """Remove files of a checkpoint, which ``stored`` names no more."""
        ...

    def pieces(self, name: str, file: str, first: int, end: int) -> Iterator[bytes]:
        """Read bytes ``first`` to ``end`` of a file, piece by piece."""
        ...

    def sweep(self, owner: str) -> None:
        """Remove what an owner has begun here and never finished."""
        ...


class DirectoryShelf:
    """Checkpoints in a directory, which every machine sees at the same path.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def description(self, name: str) -> bytes:
        """Return the content of ``checkpoint.json``; raise NotFoundError if there is none."""
        try:
            return (self._root / name / DESCRIPTION_FILE).read_bytes()
        except FileNotFoundError:
            msg = f"checkpoint {name}: there is none in {self._root}"
            raise NotFoundError(msg) from None

    def names(self) -> list[str]:
        """Return what stands on it, checkpoints and other things."""
        return [path.name for path in self._root.iterdir()] if self._root.is_dir() else []

    def check(self, stored: StoredCheckpoint) -> None:
        """Raise NotFoundError if a file is missing or has another size."""
        for resource, size in stored.resources.items():
            path = path_inside(self._root, stored.uuid, resource)
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                msg = f"checkpoint {stored.uuid}: {path} {state}; go on from an earlier checkpoint"
                raise NotFoundError(msg)

    def delete(self, name: str, trash: Path) -> None:
        """Remove a checkpoint, first out of sight: a death in the middle leaves no half of it."""
        if (self._root / name).is_file():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with contextlib.suppress(FileNotFoundError):
            (self._root / name).rename(trash)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(trash)

    def remove_files(self, stored: StoredCheckpoint, names: Sequence[str]) -> None:
        """Remove files of a checkpoint, which ``stored`` names no more."""
        directory = self._root / stored.uuid
        write_atomic(path_inside(self._root, stored.uuid, DESCRIPTION_FILE), stored.to_json())
        for name in names:
            try:
                path = path_inside(self._root, stored.uuid, name, follow=False)
            except NotFoundError as error:  # it is no file of the checkpoint
                logger.warning("%s; it is left alone", error)
                continue
            path.unlink(missing_ok=True)
            for parent in path.parents:
                if parent == directory or not parent.is_relative_to(directory):
                    break
                with contextlib.suppress(OSError):  # not empty
                    parent.rmdir()

    def pieces(self, name: str, file: str, first: int, end: int) -> Iterator[bytes]:
        """Read bytes ``first`` to ``end`` of a file, piece by piece."""
        path = path_inside(self._root, name, file)
        try:
            # A pipe would block; what was swapped for a link meanwhile is refused.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as opened:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                opened.seek(first)
                while first < end and (piece := opened.read(min(_PIECE, end - first))):
                    first += len(piece)
                    yield piece
        except FileNotFoundError:
            msg = f"checkpoint {name}: {path} is missing; go on from an earlier checkpoint"
            raise NotFoundError(msg) from None

    def sweep(self, owner: str) -> None:
        """Remove what an owner has begun here and never finished."""
        if self._root.is_dir():
            for path in self._root.glob(f"{PARTIAL}.{owner}.*"):
                shutil.rmtree(path, ignore_errors=True)


class BucketShelf:
    """Checkpoints in an object store: ``<root>/<uuid>/...``, complete with ``checkpoint.json``.

    As long as one is uploaded, an object ``.partial.<owner>.<uuid>`` says whose it is.

    Args:
        address: Of the storage.
    """

    def __init__(self, address: StorageAddress) -> None:
        self.objects = ObjectStore(address)
        self._place = address.root

    def announce(self, owner: str, name: str) -> None:
        """Say that files of a checkpoint are about to come."""
        self.objects.write(_marker(owner, name), b"an upload is going on")

    def complete(self, owner: str, stored: StoredCheckpoint) -> None:
        """Make a checkpoint of what was uploaded."""
        self.objects.write(f"{stored.uuid}/{DESCRIPTION_FILE}", stored.to_json())
        self.objects.remove([_marker(owner, stored.uuid)])

    def description(self, name: str) -> bytes:
        """Return the content of ``checkpoint.json``; raise NotFoundError if there is none."""
        try:
            return self.objects.read(f"{name}/{DESCRIPTION_FILE}")
        except NotFoundError:
            msg = f"checkpoint {name}: there is none in {self._place}"
            raise NotFoundError(msg) from None

    def names(self) -> list[str]:
        """Return what stands on it, checkpoints and other things."""
        return self.objects.children()

    def check(self, stored: StoredCheckpoint) -> None:
        """Find nothing wrong: whoever downloads a file sees whether it is what was saved."""

    def delete(self, name: str, trash: Path) -> None:
        """Remove a checkpoint; from its first step on it is none."""
        self.objects.remove([f"{name}/{DESCRIPTION_FILE}"])
        self.objects.remove_folder(name)

    def remove_files(self, stored: StoredCheckpoint, names: Sequence[str]) -> None:
        """Remove files of a checkpoint, which ``stored`` names no more."""
        self.objects.write(f"{stored.uuid}/{DESCRIPTION_FILE}", stored.to_json())
        self.objects.remove([f"{stored.uuid}/{name}" for name in names])

    def pieces(self, name: str, file: str, first: int, end: int) -> Iterator[bytes]:
        """Read bytes ``first`` to ``end`` of a file, piece by piece."""
        return self.objects.pieces(f"{name}/{file}", first, end)

    def sweep(self, owner: str) -> None:
        """Remove what an owner has begun here and never finished."""
        start = f"{PARTIAL}.{owner}."
        found = self.objects.children()
        for marker in (each for each in found if each.startswith(start)):
            self.abandon(owner, marker.removeprefix(start))

    def abandon(self, owner: str, name: str) -> None:
        """Remove the files of an upload that has not become a checkpoint."""
        try:
            self.description(name)
        except NotFoundError:
            self.objects.remove_folder(name)
        self.objects.remove([_marker(owner, name)])


def path_inside(root: Path, name: str, file: str, *, follow: bool = True) -> Path:
    """Return the path of a file of a checkpoint, which no name and no link leads out of it.

    Args:
        root: Holds the checkpoint's directory.
        name: The checkpoint's uuid, or the name of another directory directly below ``root``.
        file: Path inside the checkpoint.
        follow: Resolve a link in the place of the file itself; else only those of its folders.

    Raises:
        NotFoundError: If the name is invalid, or the path leads elsewhere.
    """
    if problem := file_name_problem(file):
        raise NotFoundError(f"checkpoint {name}: a file's name {problem}")
    directory = root.resolve() / name
    path = directory / file
    found = path.resolve() if follow else path.parent.resolve() / path.name
    if not found.is_relative_to(directory):
        raise NotFoundError(f"checkpoint {name}: {file} is a link that leads out of the checkpoint")
    return found


def _marker(owner: str, name: str) -> str:
    return f"{PARTIAL}.{owner}.{name}"
