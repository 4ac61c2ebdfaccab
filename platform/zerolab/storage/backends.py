"""Storage backends for complete checkpoints: a directory or an object store."""

import contextlib
import errno
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from zerolab.contract.names import file_name_problem
from zerolab.errors import NotFoundError
from zerolab.files import write_atomic

__all__ = [
    "DESCRIPTION_FILE",
    "PARTIAL",
    "DirectoryBackend",
    "StoredCheckpoint",
    "path_inside",
]

logger = logging.getLogger(__name__)

DESCRIPTION_FILE = "checkpoint.json"
PARTIAL = ".partial"
_PIECE = 1 << 20


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``checkpoint.json``."""

    uuid: str
    steps_completed: int
    """Number of batches (optimizer steps) completed."""
    resources: dict[str, int]
    """Path inside the checkpoint to its size in bytes."""
    metadata: dict[str, object]
    created_at: str
    """ISO 8601, UTC."""
    hashes: dict[str, str] = {}
    """Path to the content's hash (see :class:`zerolab.storage.objects.FileRecord`), for
    uploaded files."""

    def to_json(self) -> bytes:
        """Return the content of ``checkpoint.json``."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


class DirectoryBackend:
    """Checkpoints in a directory that every machine mounts at the same path.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def description(self, name: str) -> bytes:
        """Return the content of ``checkpoint.json``; raise NotFoundError if it is missing."""
        try:
            return (self._root / name / DESCRIPTION_FILE).read_bytes()
        except FileNotFoundError:
            msg = f"checkpoint {name}: not found in {self._root}"
            raise NotFoundError(msg) from None

    def names(self) -> list[str]:
        """Return the names of all entries, whether checkpoints or not."""
        return [path.name for path in self._root.iterdir()] if self._root.is_dir() else []

    def check(self, stored: StoredCheckpoint) -> None:
        """Raise NotFoundError if a file is missing or has the wrong size."""
        for resource, size in stored.resources.items():
            path = path_inside(self._root, stored.uuid, resource)
            actual = path.stat().st_size if path.is_file() else None
            if actual != size:
                state = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
                msg = f"checkpoint {stored.uuid}: {path} {state}; resume from an earlier checkpoint"
                raise NotFoundError(msg)

    def delete(self, name: str, trash: Path) -> None:
        """Remove a checkpoint, renamed first so that a crash leaves no visible half of it."""
        if (self._root / name).is_file():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with contextlib.suppress(FileNotFoundError):
            (self._root / name).rename(trash)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(trash)

    def remove_files(self, stored: StoredCheckpoint, names: Sequence[str]) -> None:
        """Remove files of a checkpoint that ``stored`` no longer lists."""
        directory = self._root / stored.uuid
        write_atomic(path_inside(self._root, stored.uuid, DESCRIPTION_FILE), stored.to_json())
        for name in names:
            try:
                path = path_inside(self._root, stored.uuid, name, follow=False)
            except NotFoundError as error:  # not a file of the checkpoint
                logger.warning("%s; this file is not removed", error)
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
            # Opening a pipe would block; O_NOFOLLOW rejects a file that was replaced by a link.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as opened:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                opened.seek(first)
                while first < end and (piece := opened.read(min(_PIECE, end - first))):
                    first += len(piece)
                    yield piece
        except FileNotFoundError:
            msg = f"checkpoint {name}: {path} is missing; resume from an earlier checkpoint"
            raise NotFoundError(msg) from None

    def sweep(self, owner: str) -> None:
        """Remove the unfinished checkpoints of an owner."""
        if self._root.is_dir():
            for path in self._root.glob(f"{PARTIAL}.{owner}.*"):
                shutil.rmtree(path, ignore_errors=True)


def path_inside(root: Path, name: str, file: str, *, follow: bool = True) -> Path:
    """Return the path of a checkpoint's file; reject names and links that lead outside.

    Args:
        root: Directory that contains the checkpoint's directory.
        name: The checkpoint's uuid, or the name of another directory directly below ``root``.
        file: Path inside the checkpoint.
        follow: Resolve a link at the path itself; otherwise only links among its parents.

    Raises:
        NotFoundError: If the name is invalid, or the path leads elsewhere.
    """
    if problem := file_name_problem(file):
        raise NotFoundError(f"checkpoint {name}: a file's name {problem}")
    directory = root.resolve() / name
    path = directory / file
    resolved = path.resolve() if follow else path.parent.resolve() / path.name
    if not resolved.is_relative_to(directory):
        raise NotFoundError(f"checkpoint {name}: {file} is a link that leads out of the checkpoint")
    return resolved
