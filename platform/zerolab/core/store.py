"""Checkpoints in a directory, or in any file system that fsspec knows: whole, or not there.

A checkpoint is a directory named by its uuid. It is written under another name, flushed to the
disk, and renamed when every rank has finished; ``checkpoint.json``, written last, names its files
and their sizes. In an object store, which cannot rename, that file is what makes it complete.
"""

import contextlib
import datetime
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from zerolab.errors import ConfigError, NotFoundError, StorageError

__all__ = ["CheckpointStore", "StoredCheckpoint", "list_files", "new_uuid"]

DESCRIPTION_FILE = "checkpoint.json"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PARTIAL = ".partial"
_PART = ".part"
_PROBE = b"\0" * 65_536
"""Written to find out whether there is room at all."""


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What ``checkpoint.json`` says."""

    uuid: str
    steps_completed: int
    """Batches (optimizer steps) that it holds."""
    resources: dict[str, int]
    """Path inside the checkpoint to its size in bytes."""
    metadata: dict[str, Any]
    created_at: str
    """ISO 8601, UTC."""


def new_uuid() -> str:
    """Return a name for a new checkpoint."""
    return str(uuid.uuid4())


class CheckpointStore:
    """A place that holds checkpoints.

    Several ranks write one checkpoint as :mod:`zerolab.core.saving` does: each calls :meth:`begin`
    with the same uuid and writes; when all have finished, one of them calls :meth:`commit`.

    Args:
        root: A directory, or a URL that fsspec knows, e.g. ``s3://bucket/prefix``. Ranks on
            several machines need a root that all of them see.
        owner: Whose unfinished checkpoints :meth:`sweep` removes, e.g. ``trial-3``.
    """

    def __init__(self, root: str | Path, *, owner: str = "local") -> None:
        url = str(root)
        self._owner = re.sub(r"[^A-Za-z0-9-]", "-", owner)
        self._remote: Any = None  # an fsspec file system; fsspec has no types
        if "://" in url and not url.startswith("file://"):
            import fsspec

            self._remote, self._prefix = fsspec.core.url_to_fs(url)
            self._root = Path(tempfile.gettempdir()) / f"zerolab-checkpoints-{os.getuid()}"
        else:
            self._root = Path(url.removeprefix("file://")).absolute()

    @property
    def is_remote(self) -> bool:
        """Whether the root is not a directory of this machine's file system."""
        return self._remote is not None

    def probe(self) -> None:
        """Write to the storage, and remove it again.

        Raises:
            StorageError: If that cannot be done.
        """
        name = new_uuid()
        try:
            with self._guarded():
                file = self.begin(name) / "probe"
                file.write_bytes(_PROBE)
                _sync(file)
                if self._remote is not None:
                    target = self._remote_path(f"{_PARTIAL}.{name}")
                    self._remote.pipe_file(target, _PROBE)
                    self._remote.rm_file(target)
        finally:
            self.abort(name)

    def begin(self, name: str, *, part: int | None = None) -> Path:
        """Return the directory into which this rank writes its part of checkpoint ``name``.

        Args:
            name: A uuid, the same on every rank.
            part: Number of a directory for this rank alone, whose files :meth:`merge` moves to
                the others'; None for the checkpoint's own.

        Raises:
            StorageError: If it cannot be made.
        """
        partial = self._partial(name)
        if part is not None:
            partial = partial / f"{_PART}.{part}"
        with self._guarded():
            partial.mkdir(parents=True, exist_ok=True, mode=0o700)
        return partial

    def merge(self, name: str, part: int) -> None:
        """Move the files of a part to their places in the checkpoint.

        Raises:
            StorageError: If that cannot be done.
        """
        source, target = self.begin(name, part=part), self._partial(name)
        with self._guarded():
            for file in list_files(source):
                place = target / file
                place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                (source / file).replace(place)
            shutil.rmtree(source)

    def commit(
        self, name: str, steps_completed: int, metadata: Mapping[str, Any]
    ) -> StoredCheckpoint:
        """Make a checkpoint appear, complete and safe from a loss of power.

        Args:
            name: The uuid given to :meth:`begin`.
            steps_completed: Batches that it holds.
            metadata: Anything that JSON can hold.

        Raises:
            StorageError: If the storage cannot take it.
        """
        with self._guarded():
            return self._commit(name, steps_completed, metadata)

    def _commit(
        self, name: str, steps_completed: int, metadata: Mapping[str, Any]
    ) -> StoredCheckpoint:
        partial = self.begin(name)
        for path in (partial, *partial.rglob("*")):
            _sync(path)
        stored = StoredCheckpoint(
            uuid=name,
            steps_completed=steps_completed,
            resources=_sizes(partial),
            metadata=dict(metadata),
            created_at=datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z"),
        )
        description = partial / DESCRIPTION_FILE
        description.write_bytes(msgspec.json.format(msgspec.json.encode(stored), indent=1))
        if self._remote is not None:
            self._upload(name, partial, stored)
            return stored
        _sync(description)
        _sync(partial)
        partial.rename(self._root / name)
        _sync(self._root)
        return stored

    def abort(self, name: str) -> None:
        """Remove an unfinished checkpoint."""
        shutil.rmtree(self._partial(name), ignore_errors=True)

    @contextlib.contextmanager
    def restore_path(self, name: str) -> Iterator[Path]:
        """Give a directory that holds a checkpoint's files, for reading, until the block ends.

        Raises:
            NotFoundError: If there is no such checkpoint, or it is not complete.
        """
        self.describe(name)
        if self._remote is None:
            yield self._root / name
            return
        with tempfile.TemporaryDirectory(prefix="zerolab-restore-") as directory:
            target = Path(directory) / name
            self._remote.get(self._remote_path(name), str(target), recursive=True)
            yield target

    def describe(self, name: str) -> StoredCheckpoint:
        """Return what is known of a complete checkpoint.

        Raises:
            NotFoundError: If there is no such checkpoint, it is not complete, or a file of it
                is missing or has another size.
        """
        _check_uuid(name)
        try:
            if self._remote is not None:
                content = self._remote.cat_file(self._remote_path(name, DESCRIPTION_FILE))
            else:
                content = (self._root / name / DESCRIPTION_FILE).read_bytes()
            stored = msgspec.json.decode(content, type=StoredCheckpoint)
        except FileNotFoundError:
            msg = f"checkpoint {name}: there is none in {self._place}"
            raise NotFoundError(msg) from None
        except msgspec.DecodeError as error:
            msg = f"checkpoint {name}: {DESCRIPTION_FILE} in {self._place} is damaged: {error}"
            raise NotFoundError(msg) from error
        if self._remote is None:
            self._check_files(stored)
        return stored

    def list(self) -> list[StoredCheckpoint]:
        """Return the complete checkpoints, oldest first."""
        if self._remote is not None:
            with_prefix = self._remote.exists(self._prefix)
            found = self._remote.ls(self._prefix, detail=False) if with_prefix else []
            names = [path.rstrip("/").rpartition("/")[2] for path in found]
        else:
            names = [path.name for path in self._root.iterdir()] if self._root.is_dir() else []
        complete = []
        for name in filter(_UUID.fullmatch, names):
            with contextlib.suppress(NotFoundError):
                complete.append(self.describe(name))
        return sorted(complete, key=lambda stored: stored.created_at)

    def latest(self) -> StoredCheckpoint | None:
        """Return the complete checkpoint that goes furthest, the newest of them."""
        found = self.list()
        return max(found, key=lambda c: (c.steps_completed, c.created_at)) if found else None

    def delete(self, name: str) -> None:
        """Delete a checkpoint; do nothing when there is none."""
        _check_uuid(name)
        if self._remote is not None:
            with contextlib.suppress(FileNotFoundError):
                self._remote.rm(self._remote_path(name), recursive=True)
            return
        # First out of sight, so that a death in the middle leaves no half of it behind.
        doomed = self._partial(name)
        with contextlib.suppress(FileNotFoundError):
            (self._root / name).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what this owner began and never finished; call it when no run of it writes."""
        if self._root.is_dir():
            for path in self._root.glob(f"{_PARTIAL}.{self._owner}.*"):
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Say of an error of the system that it is the storage that failed."""
        try:
            yield
        except OSError as error:
            what = error.strerror or str(error) or type(error).__name__
            msg = f"checkpoint storage {self._place}: cannot be written: {what}"
            raise StorageError(msg) from error

    @property
    def _place(self) -> str:
        return str(self._root) if self._remote is None else self._prefix

    def _partial(self, name: str) -> Path:
        _check_uuid(name)
        return self._root / f"{_PARTIAL}.{self._owner}.{name}"

    def _remote_path(self, name: str, *parts: str) -> str:
        return "/".join([self._prefix, name, *parts])

    def _upload(self, name: str, partial: Path, stored: StoredCheckpoint) -> None:
        for resource in (*stored.resources, DESCRIPTION_FILE):
            target = self._remote_path(name, resource)
            self._remote.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._remote.put_file(str(partial / resource), target)
        self.abort(name)

    def _check_files(self, stored: StoredCheckpoint) -> None:
        for resource, size in stored.resources.items():
            path = self._root / stored.uuid / resource
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                msg = f"checkpoint {stored.uuid}: {path} {state}; go on from an earlier checkpoint"
                raise NotFoundError(msg)


def _check_uuid(name: str) -> None:
    if not _UUID.fullmatch(name):
        raise ConfigError("checkpoint", [f"uuid: must be a checkpoint's uuid, got {name!r}"])


def _sizes(directory: Path) -> dict[str, int]:
    """Return path and size of every file below ``directory``."""
    return {name: (directory / name).stat().st_size for name in list_files(directory)}


def list_files(directory: Path) -> list[str]:
    """Return the paths, relative to it, of every file below ``directory``."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return [path.relative_to(directory).as_posix() for path in found]


def _sync(path: Path) -> None:
    """Have the disk hold a file's content, or a directory's names."""
    if not (path.is_file() or path.is_dir()):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
