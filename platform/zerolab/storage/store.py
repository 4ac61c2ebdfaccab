"""Checkpoint store in a directory or an object store; checkpoints appear atomically.

A checkpoint is a directory named by its uuid. It is written under a temporary name, synced to
disk, and renamed when every rank has finished. ``checkpoint.json``, written last, lists its files
and their sizes. An object store cannot rename, so that file completes a checkpoint there: each
rank writes to local disk and uploads its share of the files before the file is written.
"""

import contextlib
import datetime
import hashlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec

from zerolab.contract.names import file_name_problem, resources_problem
from zerolab.contract.spec import RunSpec
from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError, NotFoundError, StorageError
from zerolab.files import sync
from zerolab.registry import PARTS
from zerolab.storage.backends import (
    DESCRIPTION_FILE,
    PARTIAL,
    DirectoryBackend,
    StoredCheckpoint,
    path_inside,
)
from zerolab.storage.objects import FileRecord, TransferProgress

__all__ = [
    "CheckpointStore",
    "Selector",
    "StoredCheckpoint",
    "list_files",
    "local_owner",
    "new_uuid",
]

Selector = Callable[[str], bool]
"""Predicate that selects files by their path inside the checkpoint."""

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PART = ".part"
_PROBE = b"\0" * 65_536
"""Content of the write test; large enough to notice a full disk."""


def new_uuid() -> str:
    """Return a name for a new checkpoint."""
    return str(uuid.uuid4())


def local_owner(address: StorageAddress, run_dir: str) -> str:
    """Return an owner name, unique in a shared bucket, for a run without a server."""
    if not address.is_remote:
        return "local"
    return f"local-{hashlib.sha256(f'{socket.gethostname()}:{run_dir}'.encode()).hexdigest()[:16]}"


class CheckpointStore:
    """Store of checkpoints at one address.

    Several ranks write one checkpoint as :mod:`zerolab.core.checkpoint_writer` does. Each calls
    :meth:`begin` with the same uuid and writes. When all have finished, each uploads its files
    with :meth:`upload` (not needed for a directory), and one of them calls :meth:`commit`.

    Args:
        root: A directory, an fsspec URL such as ``s3://bucket/prefix``, or an address. Ranks on
            several machines need a directory that all of them mount.
        owner: Owner whose unfinished checkpoints :meth:`sweep` removes, e.g. ``trial-3``.
        local: Local directory for uploads to and downloads from an object store.
    """

    def __init__(
        self,
        root: str | Path | StorageAddress,
        *,
        owner: str = "local",
        local: str | Path | None = None,
    ) -> None:
        self.address = root if isinstance(root, StorageAddress) else StorageAddress(root=str(root))
        self._local = local
        self._owner = re.sub(r"[^A-Za-z0-9-]", "-", owner)
        if self.is_remote:
            self._root = Path(local or _default_cache()).absolute()
        else:
            self._root = Path(self.address.root.removeprefix("file://")).absolute()
        self._announced: set[str] = set()

    @cached_property
    def _cache(self) -> Any:
        """Local copies of checkpoints in an object store."""
        return PARTS["bucket"].CheckpointCache(self._root)

    @classmethod
    def of_run(cls, spec: RunSpec, address: StorageAddress | None = None) -> Self:
        """Return the store of a run, optionally at another address."""
        default = StorageAddress(root=spec.checkpoint_dir, options=spec.storage_options)
        owner = spec.storage_owner or f"trial-{spec.trial_id}"
        return cls(address or default, owner=owner, local=spec.checkpoint_cache or None)

    def elsewhere(self, address: StorageAddress | None) -> "CheckpointStore":
        """Return a store at another address with the same owner and local directory."""
        return CheckpointStore(address or self.address, owner=self._owner, local=self._local)

    @property
    def is_remote(self) -> bool:
        """Whether the root is an object store."""
        return self.address.is_remote

    @cached_property
    def _bucket(self) -> Any:
        """Backend of an object store, with the methods of a directory's and some more."""
        return PARTS["bucket"].BucketBackend(self.address)

    @property
    def _backend(self) -> DirectoryBackend:
        return self._bucket if self.is_remote else DirectoryBackend(self._root)

    def probe(self) -> None:
        """Write a test file to the storage and remove it.

        Raises:
            ConfigError: If the package that opens it is not installed.
            StorageError: If the storage cannot be written.
        """
        name = new_uuid()
        try:
            with self._guarded():
                file = self.begin(name) / "probe"
                file.write_bytes(_PROBE)
                sync(file)
        finally:
            self.drop(name)
        if self.is_remote:
            self.probe_bucket()

    def probe_bucket(self) -> None:
        """Write a test object to the object store and remove it, without local files.

        Raises:
            ConfigError: If the package that opens it is not installed.
            StorageError: If the storage cannot be written.
        """
        name = f".probe.{self._owner}.{new_uuid()}"
        self._bucket.objects.write(name, _PROBE)
        self._bucket.objects.remove([name])

    # -- writing ------------------------------------------------------------------------------

    def begin(self, name: str, *, part: int | None = None) -> Path:
        """Return the directory into which this rank writes its part of checkpoint ``name``.

        Args:
            name: A uuid, the same on every rank.
            part: Number of a directory for this rank alone, whose files :meth:`merge` moves;
                None for the checkpoint's shared directory.

        Raises:
            StorageError: If the directory cannot be created.
        """
        partial = self._partial(name)
        if part is not None:
            partial = partial / f"{_PART}.{part}"
        with self._guarded():
            partial.mkdir(parents=True, exist_ok=True, mode=0o700)
        return partial

    def merge(self, name: str, part: int) -> None:
        """Move the files of a part into the checkpoint's directory.

        Raises:
            StorageError: If a file cannot be moved.
        """
        source, target = self.begin(name, part=part), self._partial(name)
        with self._guarded():
            for file in list_files(source):
                destination = path_inside(target.parent, target.name, file)
                destination.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                (source / file).replace(destination)
            shutil.rmtree(source)

    def written(self, name: str) -> dict[str, int]:
        """Return the local files of an unfinished checkpoint and their sizes."""
        with self._guarded():
            return _sizes(self._partial(name))

    def announce(self, name: str) -> None:
        """Record the owner of a checkpoint in the object store before its files are uploaded.

        Raises:
            StorageError: If the storage cannot be written.
        """
        if self.is_remote:
            self._announced.add(name)
            self._bucket.announce(self._owner, name)

    def upload(self, name: str, files: Sequence[str]) -> dict[str, FileRecord]:
        """Upload some files of a checkpoint; each is retried before the upload fails.

        Args:
            name: The uuid passed to :meth:`begin`.
            files: Local paths inside the checkpoint.

        Returns:
            Path to record of the uploaded files; empty for a directory, where none are needed.

        Raises:
            StorageError: If the storage cannot take them.
        """
        if not self.is_remote:
            return {}
        partial = self._partial(name)
        with self._guarded():
            total = sum((partial / file).stat().st_size for file in files)
        progress = TransferProgress(f"checkpoint {name}: uploading", total)
        upload = self._bucket.objects.upload
        records = {file: upload(partial / file, f"{name}/{file}", progress) for file in files}
        progress.end()
        return records

    def commit(
        self,
        name: str,
        steps_completed: int,
        metadata: Mapping[str, Any],
        records: Mapping[str, FileRecord] | None = None,
    ) -> StoredCheckpoint:
        """Publish a checkpoint, complete and safe from a power loss.

        Args:
            name: The uuid passed to :meth:`begin`.
            steps_completed: Number of batches completed.
            metadata: Values that JSON can represent.
            records: Uploaded files of all ranks; by default everything is uploaded now.

        Raises:
            ConfigError: If a file's name is invalid, or it is a link that leads out of the
                checkpoint.
            StorageError: If the storage cannot take it.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        if self.is_remote and records is None:
            self.announce(name)
            records = self.upload(name, list(self.written(name)))
        records = records or {}
        if self.is_remote:
            sizes = {file: record.size for file, record in sorted(records.items())}
        else:
            sizes = self.written(name)
        if problem := resources_problem(sizes):
            raise ConfigError(f"checkpoint {name}", [f"files: {problem}"])
        stored = StoredCheckpoint(
            uuid=name,
            steps_completed=steps_completed,
            resources=sizes,
            metadata=dict(metadata),
            created_at=now,
            hashes={file: record.hash for file, record in sorted(records.items())},
        )
        if self.is_remote:
            self._bucket.complete(self._owner, stored)
        else:
            with self._guarded():
                self._publish(name, stored)
        return stored

    def _publish(self, name: str, stored: StoredCheckpoint) -> None:
        # The order makes a checkpoint with its final name complete, even after a loss of power:
        # first the data, then the description, which says that the data is complete, then the names
        # in the directory, and only then the rename. The last sync makes the rename itself durable,
        # because the server may delete the previous checkpoint as soon as this one is reported.
        partial = self.begin(name)
        for path in (partial, *partial.rglob("*")):
            sync(path)
        description = partial / DESCRIPTION_FILE
        description.write_bytes(stored.to_json())
        sync(description)
        sync(partial)
        partial.rename(self._root / name)
        sync(self._root)

    def keep_copy(self, name: str) -> None:
        """Keep the uploaded files in the local cache, for a trial that resumes on this machine."""
        partial = self._partial(name)
        if not self.is_remote or not partial.is_dir():
            return
        with contextlib.suppress(OSError):  # the copy is optional
            self._cache.adopt(name, partial)
        self.drop(name)

    def abort(self, name: str) -> None:
        """Remove an unfinished checkpoint, locally and in the object store."""
        self.drop(name)
        if name in self._announced:
            with contextlib.suppress(StorageError):  # the next sweep removes it
                self._bucket.abandon(self._owner, name)

    def drop(self, name: str) -> None:
        """Remove the local files of an unfinished checkpoint."""
        shutil.rmtree(self._partial(name), ignore_errors=True)

    def sweep(self, owner: str | None = None) -> None:
        """Remove the unfinished checkpoints of an owner; call it while none of its runs writes.

        Args:
            owner: Owner name; this store's by default.

        Raises:
            StorageError: If an object store cannot be listed.
        """
        owner = self._owner if owner is None else owner
        DirectoryBackend(self._root).sweep(owner)
        if self.is_remote:
            self._bucket.sweep(owner)

    # -- reading ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def restore_path(self, name: str, selector: Selector | None = None) -> Iterator[Path]:
        """Yield a local directory with a checkpoint's files, for reading, until the block ends.

        Args:
            name: The checkpoint's uuid.
            selector: Selects files; an object store fetches only the selected ones.

        Raises:
            NotFoundError: If the checkpoint does not exist, is incomplete, or a file differs from
                the saved one.
            StorageError: If the storage cannot be read.
        """
        stored = self.describe(name)
        if not self.is_remote:
            yield self._root / name
            return
        selected = [file for file in stored.resources if selector is None or selector(file)]
        with self._cache.entry(name, lambda path: self._fetch(stored, selected, path)) as path:
            yield path

    def download(self, name: str, directory: Path, selector: Selector | None = None) -> list[str]:
        """Copy a checkpoint's files into a directory; files that are present are skipped.

        Returns:
            The selected files, all of them present.

        Raises:
            NotFoundError: See :meth:`restore_path`.
            StorageError: See :meth:`restore_path`.
        """
        stored = self.describe(name)
        selected = [file for file in stored.resources if selector is None or selector(file)]
        directory.mkdir(parents=True, exist_ok=True)
        if self.is_remote:
            self._fetch(stored, selected, directory)
            return selected
        for file in selected:
            target = path_inside(directory.parent, directory.name, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path_inside(self._root, name, file), target)
        return selected

    def _fetch(self, stored: StoredCheckpoint, selected: Sequence[str], directory: Path) -> None:
        missing = [
            file
            for file in selected
            if not (directory / file).is_file()
            or (directory / file).stat().st_size != stored.resources[file]
        ]
        total = sum(stored.resources[file] for file in missing)
        progress = TransferProgress(f"checkpoint {stored.uuid}: downloading", total)
        for file in missing:
            record = FileRecord(stored.resources[file], stored.hashes.get(file, ""))
            source = f"{stored.uuid}/{file}"
            target = path_inside(directory.parent, directory.name, file)
            self._bucket.objects.download(source, target, record, progress)
        progress.end()

    def pieces(self, name: str, file: str, first: int, end: int) -> Iterator[bytes]:
        """Read bytes ``first`` to ``end`` of a file of a checkpoint, piece by piece."""
        _check_uuid(name)
        return self._backend.pieces(name, file, first, end)

    def describe(self, name: str) -> StoredCheckpoint:
        """Return the description of a complete checkpoint.

        Raises:
            NotFoundError: If the checkpoint does not exist, is incomplete, or a file is missing
                or has the wrong size.
            StorageError: If the storage cannot be read.
        """
        stored = self._described(name)
        self._backend.check(stored)
        return stored

    def _described(self, name: str) -> StoredCheckpoint:
        _check_uuid(name)
        try:
            stored = msgspec.json.decode(self._backend.description(name), type=StoredCheckpoint)
        except msgspec.DecodeError as error:
            raise self._damaged(name, str(error)) from error
        if stored.uuid != name:
            raise self._damaged(name, f"uuid: must be {name}, got {stored.uuid[:50]!r}")
        if problem := resources_problem(stored.resources):
            raise self._damaged(name, f"resources: {problem}")
        return stored

    def _damaged(self, name: str, problem: str) -> NotFoundError:
        root = self.address.root
        msg = f"checkpoint {name}: {DESCRIPTION_FILE} in {root} is damaged: {problem}"
        return NotFoundError(msg)

    def list(self) -> list[StoredCheckpoint]:
        """Return the complete checkpoints, oldest first."""
        complete = []
        for name in filter(_UUID.fullmatch, self._backend.names()):
            with contextlib.suppress(NotFoundError):
                complete.append(self.describe(name))
        return sorted(complete, key=lambda stored: stored.created_at)

    def latest(self) -> StoredCheckpoint | None:
        """Return the complete checkpoint with the most steps; the newest of several."""
        checkpoints = self.list()
        return max(checkpoints, key=lambda c: (c.steps_completed, c.created_at), default=None)

    # -- removing -----------------------------------------------------------------------------

    def delete(self, name: str) -> None:
        """Delete a checkpoint; do nothing if it does not exist.

        Raises:
            StorageError: If it cannot be deleted.
        """
        trash = self._partial(name)
        if self.is_remote:
            self._cache.forget(name)
        with self._guarded("cannot be deleted from"):
            self._backend.delete(name, trash)

    def remove_files(self, name: str, files: Sequence[str]) -> None:
        """Delete some files of a checkpoint and keep the others.

        Raises:
            StorageError: If they cannot be deleted.
        """
        try:
            stored = self._described(name)
        except NotFoundError:
            return
        files = [file for file in files if not file_name_problem(file)]
        removed = set(files)
        remaining = {file: size for file, size in stored.resources.items() if file not in removed}
        hashes = {file: digest for file, digest in stored.hashes.items() if file not in removed}
        updated = msgspec.structs.replace(stored, resources=remaining, hashes=hashes)
        with self._guarded("cannot be deleted from"):
            self._backend.remove_files(updated, files)

    @contextlib.contextmanager
    def _guarded(self, doing: str = "cannot be written") -> Iterator[None]:
        """Convert an OSError into a StorageError."""
        try:
            yield
        except OSError as error:
            root = self._root if self.is_remote else self.address.root
            detail = error.strerror or str(error) or type(error).__name__
            raise StorageError(f"checkpoint storage {root}: {doing}: {detail}") from error

    def _partial(self, name: str) -> Path:
        _check_uuid(name)
        return self._root / f"{PARTIAL}.{self._owner}.{name}"


def _default_cache() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME")
    return (Path(configured) if configured else Path.home() / ".cache") / "zerolab" / "checkpoints"


def _check_uuid(name: str) -> None:
    if not _UUID.fullmatch(name):
        raise ConfigError("checkpoint", [f"uuid: must be a checkpoint's uuid, got {name!r}"])


def _sizes(directory: Path) -> dict[str, int]:
    """Return path and size of every file below ``directory``.

    Raises:
        ConfigError: If one is a link that leads out of the directory.
    """
    names = list_files(directory)
    top = directory.resolve()
    outside = [name for name in names if not (directory / name).resolve().is_relative_to(top)]
    if outside:
        problem = "is a link that leads out of the checkpoint; save a copy of the file"
        raise ConfigError("checkpoint", [f"{name}: {problem}" for name in outside[:10]])
    return {name: (directory / name).stat().st_size for name in names}


def list_files(directory: Path) -> list[str]:
    """Return the relative paths of all files below ``directory``."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return [path.relative_to(directory).as_posix() for path in files]
