"""Checkpoints in a directory, or in an object store: whole, or not there.

A checkpoint is a directory named by its uuid. It is written under another name, flushed to the
disk, and renamed when every rank has finished; ``checkpoint.json``, written last, names its files
and their sizes. In an object store, which cannot rename, that file is what makes it complete: the
ranks write on their machine, bring their files up, each some of them, and then it is written.
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
from zerolab.storage.cache import Cache
from zerolab.storage.faults import storage_error
from zerolab.storage.objects import FileRecord
from zerolab.storage.progress import TransferProgress
from zerolab.storage.shelves import (
    DESCRIPTION_FILE,
    PARTIAL,
    BucketShelf,
    DirectoryShelf,
    Shelf,
    StoredCheckpoint,
    path_inside,
)

__all__ = [
    "CheckpointStore",
    "Selector",
    "StoredCheckpoint",
    "list_files",
    "local_owner",
    "new_uuid",
]

Selector = Callable[[str], bool]
"""Whether a file is wanted, by its path inside the checkpoint."""

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PART = ".part"
_PROBE = b"\0" * 65_536
"""Written to find out whether there is room at all."""


def new_uuid() -> str:
    """Return a name for a new checkpoint."""
    return str(uuid.uuid4())


def local_owner(address: StorageAddress, run_dir: str) -> str:
    """Return the owner's name of a run without a server, of which a bucket may have many."""
    if not address.is_remote:
        return "local"
    return f"local-{hashlib.sha256(f'{socket.gethostname()}:{run_dir}'.encode()).hexdigest()[:16]}"


class CheckpointStore:
    """A place that holds checkpoints.

    Several ranks write one checkpoint as :mod:`zerolab.core.checkpoint_writer` does: each calls
    :meth:`begin` with the same uuid and writes; when all have finished, each brings up its files
    (:meth:`upload`; a directory needs none of it), and one of them calls :meth:`commit`.

    Args:
        root: A directory, a URL that fsspec knows, e.g. ``s3://bucket/prefix``, or an address.
            Ranks on several machines need a directory that all of them see.
        owner: Whose unfinished checkpoints :meth:`sweep` removes, e.g. ``trial-3``.
        local: Directory of this machine for what goes to an object store, and comes from there.
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
        self._cache = Cache(self._root)
        self._announced: set[str] = set()

    @classmethod
    def of_run(cls, spec: RunSpec, address: StorageAddress | None = None) -> Self:
        """Make the store of a run, or another one for the same run."""
        own = StorageAddress(root=spec.checkpoint_dir, options=spec.storage_options)
        owner = spec.storage_owner or f"trial-{spec.trial_id}"
        return cls(address or own, owner=owner, local=spec.checkpoint_cache or None)

    def elsewhere(self, address: StorageAddress | None) -> "CheckpointStore":
        """Return a store at another address, for the same owner on this machine."""
        return CheckpointStore(address or self.address, owner=self._owner, local=self._local)

    @property
    def is_remote(self) -> bool:
        """Whether the root is not a directory of this machine's file system."""
        return self.address.is_remote

    @cached_property
    def _bucket(self) -> BucketShelf:
        return BucketShelf(self.address)

    @property
    def _shelf(self) -> Shelf:
        return self._bucket if self.is_remote else DirectoryShelf(self._root)

    def probe(self) -> None:
        """Write to the storage, and remove it again.

        Raises:
            ConfigError: If the package that opens it is not installed.
            StorageError: If that cannot be done.
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
        """Write to the object store, and remove it again; touch nothing of this machine.

        Raises:
            ConfigError: If the package that opens it is not installed.
            StorageError: If that cannot be done.
        """
        self._bucket.objects.probe(f".probe.{self._owner}.{new_uuid()}", _PROBE)

    # -- writing ------------------------------------------------------------------------------

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
                place = path_inside(target.parent, target.name, file)
                place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                (source / file).replace(place)
            shutil.rmtree(source)

    def written(self, name: str) -> dict[str, int]:
        """Return the files of an unfinished checkpoint on this machine, and their sizes."""
        with self._guarded():
            return _sizes(self._partial(name))

    def announce(self, name: str) -> None:
        """Say in an object store that files of a checkpoint are about to come.

        Raises:
            StorageError: If the storage cannot be written.
        """
        if self.is_remote:
            self._announced.add(name)
            self._bucket.announce(self._owner, name)

    def upload(self, name: str, files: Sequence[str]) -> dict[str, FileRecord]:
        """Bring some files of a checkpoint up; each is tried again before that is given up.

        Args:
            name: The uuid given to :meth:`begin`.
            files: Paths inside the checkpoint, on this machine.

        Returns:
            Path to what has arrived; nothing for a directory, where it is already.

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
        """Make a checkpoint appear, complete and safe from a loss of power.

        Args:
            name: The uuid given to :meth:`begin`.
            steps_completed: Batches that it holds.
            metadata: Anything that JSON can hold.
            records: What all ranks have uploaded; everything is uploaded now when left out.

        Raises:
            ConfigError: If a file has a name that no checkpoint may hold, or is a link that leads
                out of the checkpoint.
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
        """Keep what was uploaded at hand, for whoever goes on from it on this machine."""
        partial = self._partial(name)
        if not self.is_remote or not partial.is_dir():
            return
        with contextlib.suppress(OSError):  # a copy is a convenience
            self._cache.adopt(name, partial)
        self.drop(name)

    def abort(self, name: str) -> None:
        """Remove an unfinished checkpoint, here and, if anything of it is there, in the store."""
        self.drop(name)
        if name in self._announced:
            with contextlib.suppress(StorageError):  # the next sweep removes it
                self._bucket.abandon(self._owner, name)

    def drop(self, name: str) -> None:
        """Remove the files of an unfinished checkpoint on this machine."""
        shutil.rmtree(self._partial(name), ignore_errors=True)

    def sweep(self, owner: str | None = None) -> None:
        """Remove what an owner began and never finished; call it when no run of it writes.

        Args:
            owner: This store's own when left out.

        Raises:
            StorageError: If an object store does not say what there is.
        """
        owner = self._owner if owner is None else owner
        DirectoryShelf(self._root).sweep(owner)
        if self.is_remote:
            self._bucket.sweep(owner)

    # -- reading ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def restore_path(self, name: str, selector: Selector | None = None) -> Iterator[Path]:
        """Give a directory that holds a checkpoint's files, for reading, until the block ends.

        Args:
            name: Its uuid.
            selector: Which files are wanted; from an object store only those are fetched.

        Raises:
            NotFoundError: If there is no such checkpoint, it is not complete, or a file of it is
                not what was saved.
            StorageError: If the storage cannot be read.
        """
        stored = self.describe(name)
        if not self.is_remote:
            yield self._root / name
            return
        wanted = [file for file in stored.resources if selector is None or selector(file)]
        with self._cache.entry(name, lambda path: self._fetch(stored, wanted, path)) as path:
            yield path

    def download(self, name: str, directory: Path, selector: Selector | None = None) -> list[str]:
        """Copy a checkpoint's files into a directory; what is there already is not copied again.

        Returns:
            The files that are there now.

        Raises:
            NotFoundError: As :meth:`restore_path`.
            StorageError: As :meth:`restore_path`.
        """
        stored = self.describe(name)
        wanted = [file for file in stored.resources if selector is None or selector(file)]
        directory.mkdir(parents=True, exist_ok=True)
        if self.is_remote:
            self._fetch(stored, wanted, directory)
            return wanted
        for file in wanted:
            target = path_inside(directory.parent, directory.name, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path_inside(self._root, name, file), target)
        return wanted

    def _fetch(self, stored: StoredCheckpoint, wanted: Sequence[str], directory: Path) -> None:
        missing = [
            file
            for file in wanted
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
        return self._shelf.pieces(name, file, first, end)

    def describe(self, name: str) -> StoredCheckpoint:
        """Return what is known of a complete checkpoint.

        Raises:
            NotFoundError: If there is no such checkpoint, it is not complete, or a file of it
                is missing or has another size.
            StorageError: If the storage cannot be read.
        """
        stored = self._described(name)
        self._shelf.check(stored)
        return stored

    def _described(self, name: str) -> StoredCheckpoint:
        _check_uuid(name)
        try:
            stored = msgspec.json.decode(self._shelf.description(name), type=StoredCheckpoint)
        except msgspec.DecodeError as error:
            raise self._damaged(name, str(error)) from error
        if stored.uuid != name:
            raise self._damaged(name, f"uuid: must be {name}, got {stored.uuid[:50]!r}")
        if problem := resources_problem(stored.resources):
            raise self._damaged(name, f"resources: {problem}")
        return stored

    def _damaged(self, name: str, problem: str) -> NotFoundError:
        place = self.address.root
        msg = f"checkpoint {name}: {DESCRIPTION_FILE} in {place} is damaged: {problem}"
        return NotFoundError(msg)

    def list(self) -> list[StoredCheckpoint]:
        """Return the complete checkpoints, oldest first."""
        complete = []
        for name in filter(_UUID.fullmatch, self._shelf.names()):
            with contextlib.suppress(NotFoundError):
                complete.append(self.describe(name))
        return sorted(complete, key=lambda stored: stored.created_at)

    def latest(self) -> StoredCheckpoint | None:
        """Return the complete checkpoint that goes furthest, the newest of them."""
        found = self.list()
        return max(found, key=lambda c: (c.steps_completed, c.created_at)) if found else None

    # -- removing -----------------------------------------------------------------------------

    def delete(self, name: str) -> None:
        """Delete a checkpoint; do nothing when there is none.

        Raises:
            StorageError: If it cannot be deleted.
        """
        trash = self._partial(name)
        if self.is_remote:
            self._cache.forget(name)
        with self._guarded("cannot be deleted from"):
            self._shelf.delete(name, trash)

    def remove_files(self, name: str, files: Sequence[str]) -> None:
        """Delete some files of a checkpoint, which is then one without them.

        Raises:
            StorageError: If they cannot be deleted.
        """
        try:
            stored = self._described(name)
        except NotFoundError:
            return
        files = [file for file in files if not file_name_problem(file)]
        gone = set(files)
        rest = {file: size for file, size in stored.resources.items() if file not in gone}
        hashes = {file: digest for file, digest in stored.hashes.items() if file not in gone}
        left = msgspec.structs.replace(stored, resources=rest, hashes=hashes)
        with self._guarded("cannot be deleted from"):
            self._shelf.remove_files(left, files)

    @contextlib.contextmanager
    def _guarded(self, doing: str = "cannot be written") -> Iterator[None]:
        """Say of an error of the system that it is the storage that failed."""
        try:
            yield
        except OSError as error:
            place = self.address
            if self.is_remote:
                place = StorageAddress(root=str(self._root))
            raise storage_error(place, error, doing) from error

    def _partial(self, name: str) -> Path:
        _check_uuid(name)
        return self._root / f"{PARTIAL}.{self._owner}.{name}"


def _default_cache() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "zerolab" / "checkpoints"


def _check_uuid(name: str) -> None:
    if not _UUID.fullmatch(name):
        raise ConfigError("checkpoint", [f"uuid: must be a checkpoint's uuid, got {name!r}"])


def _sizes(directory: Path) -> dict[str, int]:
    """Return path and size of every file below ``directory``.

    Raises:
        ConfigError: If one is a link that leads out of it.
    """
    names = list_files(directory)
    top = directory.resolve()
    outside = [name for name in names if not (directory / name).resolve().is_relative_to(top)]
    if outside:
        problem = "is a link that leads out of the checkpoint; save a copy of the file"
        raise ConfigError("checkpoint", [f"{name}: {problem}" for name in outside[:10]])
    return {name: (directory / name).stat().st_size for name in names}


def list_files(directory: Path) -> list[str]:
    """Return the paths, relative to it, of every file below ``directory``."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return [path.relative_to(directory).as_posix() for path in found]
