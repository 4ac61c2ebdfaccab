"""Checkpoint commit: all ranks write, then the checkpoint appears and is reported.

::

    draft = saver.begin()                  a name and a directory, the same on all ranks
    ... every rank writes below draft.path
    upload = saver.send(draft, metadata)   to an object store: every rank some of the files
    saver.complete(upload, steps)          complete, renamed, reported; or an error on all ranks

Only the chief removes the files of a draft, after every rank has confirmed that it writes no more.
The trial's next run removes the files of a dead run.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any

from zerolab.errors import ConfigError, StaleRunError, StorageError, is_storage_failure
from zerolab.ranks import Ranks
from zerolab.reports.reporter import Reporter, json_metadata
from zerolab.storage.objects import FileRecord, file_hash
from zerolab.storage.store import CheckpointStore, list_files, new_uuid

__all__ = ["CheckpointSaver", "Draft", "PendingUpload", "merge_metadata"]

logger = logging.getLogger(__name__)

_NOT_STORED = "checkpoint: not stored"
_POLL_S = 10.0


@dataclass(frozen=True)
class Draft:
    """Checkpoint that is being written."""

    uuid: str
    path: Path
    """Directory in which this rank writes."""
    is_per_rank: bool
    """Whether every rank has its own directory; :meth:`CheckpointSaver.send` merges them."""


class CheckpointSaver:
    """Commits checkpoints to a storage and reports them.

    Args:
        store: Storage of the checkpoints.
        ranks: Ranks that write them together.
        reporter: Reporter of the run, which also knows whether it is stale; None on all ranks but
            the chief.
    """

    def __init__(self, store: CheckpointStore, ranks: Ranks, reporter: Reporter | None) -> None:
        self._store = store
        self._ranks = ranks
        self._reporter = reporter

    def begin(self, *, per_rank: bool = False) -> Draft:
        """Create the directory for a checkpoint. **Collective**.

        Args:
            per_rank: Give every rank its own directory, so that no rank silently overwrites
                another's files.

        Raises:
            StorageError: On all ranks, if the storage cannot be written on one.
        """
        name = self._ranks.broadcast(new_uuid(), "naming a checkpoint")
        part = self._ranks.rank if per_rank else None
        path = Path()
        with self._ranks.together("checkpoint: not begun"):
            path = self._store.begin(name, part=part)
        return Draft(name, path, per_rank)

    def publish(self, draft: Draft, steps: int, metadata: Mapping[str, Any]) -> None:
        """Upload a checkpoint and commit it. **Collective**.

        Nothing is left of it on any rank when this fails.

        Args:
            draft: From :meth:`begin`; every rank has written its part.
            steps: Batches (optimizer steps) of the checkpoint.
            metadata: As for :meth:`send`.

        Raises:
            ConfigError: On all ranks, if files or metadata of ranks conflict.
            StaleRunError: On all ranks, if another run has taken over.
            StorageError: On all ranks, if the storage fails.
        """
        self.complete(self.send(draft, metadata), steps)

    def send(self, draft: Draft, metadata: Mapping[str, Any]) -> "PendingUpload":
        """Start the upload of all ranks' files to an object store. **Collective**.

        Each rank uploads the files that it has written. Where ranks share a directory, each of a
        machine's ranks uploads some of the files. A directory storage needs no upload.

        Args:
            draft: From :meth:`begin`; every rank has written its part.
            metadata: Values that JSON can represent. With a directory for each rank, the metadata
                of all ranks is merged; else the chief's is used.

        Returns:
            The upload in the background; :meth:`complete` waits for it.

        Raises:
            ConfigError: On all ranks, if files or metadata of ranks conflict.
            StorageError: On all ranks, if the storage fails.
        """
        files: list[str] = []
        try:
            if draft.is_per_rank:
                metadata, files = self._merge(draft, metadata)
            else:
                self._ranks.barrier("all ranks have written the checkpoint")
            with self._ranks.together(_NOT_STORED):
                if not draft.is_per_rank:
                    files = self._files_to_upload(draft)
        except BaseException:
            self.abandon(draft)
            raise
        sending = PendingUpload(self._store, draft, files, dict(metadata))
        sending.start()
        return sending

    def complete(self, sending: "PendingUpload", steps: int) -> None:
        """Wait for the upload, commit the checkpoint and report it. **Collective**.

        Nothing is left of it on any rank when this fails.

        Args:
            sending: Upload from :meth:`send`.
            steps: Batches (optimizer steps) of the checkpoint.

        Raises:
            StaleRunError: On all ranks, if another run has taken over.
            StorageError: On all ranks, if the storage fails.
        """
        draft, ranks = sending.draft, self._ranks
        try:
            while not all(ranks.allgather(sending.wait_for(_POLL_S), "uploading a checkpoint")):
                pass  # an upload may take longer than the timeout of a collective
            own_records: dict[str, FileRecord] = {}
            with ranks.together(_NOT_STORED):
                own_records = sending.result()
            all_fields = ranks.allgather(
                {name: (r.size, r.hash) for name, r in own_records.items()}
            )
            records = {
                name: FileRecord(*fields) for part in all_fields for name, fields in part.items()
            }
            # Every rank has confirmed its files, so the rename publishes a complete checkpoint.
            with ranks.together(_NOT_STORED):
                if ranks.is_chief:
                    self._commit(draft.uuid, steps, json_metadata(sending.metadata), records)
        except BaseException:
            self.abandon(draft)
            raise
        if ranks.local_rank == 0:
            self._store.keep_copy(draft.uuid)

    @contextmanager
    def storage_errors(self) -> Iterator[None]:
        """Convert errors in the block to a storage error if the storage is the cause.

        Not every library reports a full disk as such, so the storage is tested after an error.

        Raises:
            StorageError: Instead of another error, if the storage cannot be written now.
        """
        try:
            yield
        except Exception as error:
            if not is_storage_failure(error):
                self._probe_after(error)
            raise

    def _probe_after(self, error: Exception) -> None:
        try:
            self._store.probe()
        except StorageError as storage:
            raise storage from error

    def abandon(self, draft: Draft) -> None:
        """Remove the files of a draft; call it only when every rank does."""
        if self._ranks.is_chief:
            self._store.abort(draft.uuid)
        elif self._store.is_remote and self._ranks.local_rank == 0:
            self._store.drop(draft.uuid)

    def _files_to_upload(self, draft: Draft) -> list[str]:
        """Return this rank's share of the files in a directory that a machine's ranks share.

        Sorted by size, each rank takes every n-th file, so that the shares are about equal.
        """
        if not self._store.is_remote:
            return []
        sizes = self._store.written(draft.uuid)
        by_size = sorted(sizes, key=lambda name: (-sizes[name], name))
        return by_size[self._ranks.local_rank :: self._ranks.local_size]

    def _commit(
        self,
        name: str,
        steps: int,
        metadata: Mapping[str, Any],
        records: Mapping[str, FileRecord],
    ) -> None:
        if self._reporter is not None and self._reporter.stale.is_set():
            msg = "another run has taken over this trial; this checkpoint is dropped"
            raise StaleRunError(msg)
        # Stored before it is reported: trials resume from reported checkpoints, so a crash between
        # the two may lose this one, but never leads to an incomplete one.
        stored = self._store.commit(name, steps, metadata, records)
        if self._reporter is not None:
            self._reporter.report_checkpoint(name, steps, stored.resources, metadata)
        logger.info("checkpoint %s after batch %d", name, steps)

    def _merge(self, draft: Draft, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Merge the parts of all ranks. **Collective**.

        Returns:
            The merged metadata, and this rank's files; the first rank keeps a file that several
            ranks have written with the same content.
        """
        ranks, names, own_metadata = self._ranks, list[str](), dict[str, Any]()
        with ranks.together(_NOT_STORED):
            names, own_metadata = list_files(draft.path), json_metadata(metadata)
        all_parts = ranks.allgather([names, own_metadata], "comparing the parts of a checkpoint")
        files = [set(of_rank) for of_rank, _ in all_parts]
        hashes: dict[str, str] = {}
        with ranks.together(_NOT_STORED):
            for name in names:
                if sum(name in of_rank for of_rank in files) > 1:
                    hashes[name] = file_hash(draft.path / name)
        compared = ranks.allgather(hashes, "comparing files of the same name")
        problems: list[str] = []
        merged: dict[str, Any] = {}
        for rank, (_, details) in enumerate(all_parts):
            merged = merge_metadata(merged, details, rank, problems)
        problems += _conflicts(compared) + _file_folder_conflicts(files)
        if problems:
            raise ConfigError(f"{_NOT_STORED}: its ranks contradict each other", problems)
        with ranks.together(_NOT_STORED):
            self._store.merge(draft.uuid, ranks.rank)
        earlier = set().union(*files[: ranks.rank])
        own_files = [name for name in names if name not in earlier]
        return merged, own_files if self._store.is_remote else []


@dataclass
class PendingUpload:
    """Upload of a draft's files to an object store."""

    store: CheckpointStore
    draft: Draft
    files: list[str]
    """Files that this rank uploads."""
    metadata: dict[str, Any]
    """Metadata of the checkpoint."""
    _records: dict[str, FileRecord] = field(default_factory=dict)
    _error: Exception | None = None
    _thread: Thread | None = None

    def start(self) -> None:
        """Start the upload in a background thread."""
        if self.store.is_remote:
            name = f"upload {self.draft.uuid}"
            # A failing run does not wait for it: the next run removes the files.
            self._thread = Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank's part has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait_for(self, timeout_s: float) -> bool:
        """Wait for this rank's part; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.done

    def result(self) -> dict[str, FileRecord]:
        """Return this rank's uploaded files; requires :attr:`done`.

        Raises:
            StorageError: If the upload failed.
        """
        if self._error is not None:
            raise self._error
        return self._records

    def _run(self) -> None:
        try:
            self.store.announce(self.draft.uuid)
            self._records = self.store.upload(self.draft.uuid, self.files)
        except Exception as error:  # noqa: BLE001 - raised by result(), on every rank
            self._error = error


def merge_metadata(
    merged: Mapping[str, Any],
    more: Mapping[str, Any],
    rank: int,
    problems: list[str],
    prefix: str = "metadata",
) -> dict[str, Any]:
    """Merge a rank's metadata into that of the ranks before it, recursively.

    Args:
        merged: Metadata of the ranks before.
        more: Metadata of this rank.
        rank: This rank.
        problems: Receives a line for every key with two values.
        prefix: Prefix of the keys in those lines.
    """
    result = dict(merged)
    for key, value in more.items():
        present = result.get(key)
        name = f"{prefix}.{key}"
        if key not in result:
            result[key] = value
        elif isinstance(present, Mapping) and isinstance(value, Mapping):
            result[key] = merge_metadata(present, value, rank, problems, name)
        elif present != value or type(present) is not type(value):
            problems.append(
                f"{name}: must be the same wherever it is given, got {value!r} on rank {rank} "
                f"and {present!r} on a rank before it; give it on one rank"
            )
    return result


def _file_folder_conflicts(files: Sequence[set[str]]) -> list[str]:
    """Report names that are a file of one rank and a folder of another."""
    folders = [
        {str(folder) for name in of_rank for folder in PurePosixPath(name).parents}
        for of_rank in files
    ]
    return [
        f"{name}: rank {rank} has written a file of that name, and rank {other} a folder; put the "
        "rank into one of them"
        for rank, of_rank in enumerate(files)
        for other, of_other in enumerate(folders)
        for name in sorted(of_rank & of_other)
    ]


def _conflicts(hashes: Sequence[Mapping[str, str]]) -> list[str]:
    """Report files that two ranks have written with different content."""
    problems = []
    for name in sorted({name for of_rank in hashes for name in of_rank}):
        writers = [rank for rank, of_rank in enumerate(hashes) if name in of_rank]
        if len({hashes[rank][name] for rank in writers}) > 1:
            problems.append(
                f"{name}: ranks {', '.join(map(str, writers))} have written different content; "
                "put the rank into its name"
            )
    return problems
