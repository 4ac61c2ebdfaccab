"""The one way to a checkpoint: all ranks write, then it appears, is reported, or is nowhere.

::

    draft = saver.begin()                  a name and a place, the same on all ranks
    ... every rank writes below draft.path
    sending = saver.send(draft, metadata)  to an object store: every rank some of the files
    saver.complete(sending, steps)         complete, renamed, told to the server; or an error on all

Files of a draft are removed by the chief alone, and only when every rank has said that it writes
no more. What a death leaves behind, the trial's next run sweeps up.
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
from zerolab.reports.reporter import Reporter, plain_metadata
from zerolab.storage.objects import FileRecord, file_hash
from zerolab.storage.store import CheckpointStore, list_files, new_uuid

__all__ = ["CheckpointSaver", "Draft", "Sending", "merge_metadata"]

logger = logging.getLogger(__name__)

_NOT_STORED = "checkpoint: not stored"
_LOOK_S = 10.0


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written."""

    uuid: str
    path: Path
    """Where this rank writes."""
    apart: bool
    """Whether every rank writes into a directory of its own, which :meth:`publish` merges."""


class CheckpointSaver:
    """Brings checkpoints into a storage and to the knowledge of the server.

    Args:
        store: Where they go.
        ranks: Who writes them together.
        reporter: Told of each, and whether the run is stale; None on all ranks but the chief.
    """

    def __init__(self, store: CheckpointStore, ranks: Ranks, reporter: Reporter | None) -> None:
        self._store = store
        self._ranks = ranks
        self._reporter = reporter

    def begin(self, *, apart: bool = False) -> Draft:
        """Make the place for a checkpoint. **Collective**.

        Args:
            apart: Give every rank a directory of its own, so that none overwrites what another
                has written without anyone's notice.

        Raises:
            StorageError: On all ranks, if the storage cannot be written on one.
        """
        name = self._ranks.broadcast(new_uuid(), "naming a checkpoint")
        part = self._ranks.rank if apart else None
        path = Path()
        with self._ranks.together("checkpoint: not begun"):
            path = self._store.begin(name, part=part)
        return Draft(name, path, apart)

    def publish(self, draft: Draft, steps: int, metadata: Mapping[str, Any]) -> None:
        """Bring a checkpoint up where it must go, and make it appear. **Collective**.

        Nothing is left of it when this fails, on any rank.

        Args:
            draft: From :meth:`begin`; every rank has written its part.
            steps: Batches (optimizer steps) that it holds.
            metadata: As for :meth:`send`.

        Raises:
            ConfigError: On all ranks, if ranks contradict each other in files or metadata.
            StaleRunError: On all ranks, if another run has taken over.
            StorageError: On all ranks, if the storage cannot take it.
        """
        self.complete(self.send(draft, metadata), steps)

    def send(self, draft: Draft, metadata: Mapping[str, Any]) -> "Sending":
        """Begin to bring what all ranks have written to an object store. **Collective**.

        Each rank brings up what it has written itself; where ranks write into one directory, each
        of a machine's ranks takes some of the files. In a directory they lie already.

        Args:
            draft: From :meth:`begin`; every rank has written its part.
            metadata: Anything that JSON can hold. Where ranks write apart, what all of them say
                is merged; else the chief's counts.

        Returns:
            What goes on in the background; :meth:`complete` waits for it.

        Raises:
            ConfigError: On all ranks, if ranks contradict each other in files or metadata.
            StorageError: On all ranks, if the storage cannot take it.
        """
        files: list[str] = []
        try:
            if draft.apart:
                metadata, files = self._merge(draft, metadata)
            else:
                self._ranks.barrier("all ranks have written the checkpoint")
            with self._ranks.together(_NOT_STORED):
                if not draft.apart:
                    files = self._share_of(draft)
        except BaseException:
            self.abandon(draft)
            raise
        sending = Sending(self._store, draft, files, dict(metadata))
        sending.start()
        return sending

    def complete(self, sending: "Sending", steps: int) -> None:
        """Make a checkpoint appear, complete, and report it. **Collective**.

        Nothing is left of it when this fails, on any rank.

        Args:
            sending: From :meth:`send`; it is waited for.
            steps: Batches (optimizer steps) that it holds.

        Raises:
            StaleRunError: On all ranks, if another run has taken over.
            StorageError: On all ranks, if the storage cannot take it.
        """
        draft, ranks = sending.draft, self._ranks
        try:
            while not all(ranks.allgather(sending.wait_for(_LOOK_S), "bringing a checkpoint up")):
                pass  # an upload may take longer than ranks wait for each other
            mine: dict[str, FileRecord] = {}
            with ranks.together(_NOT_STORED):
                mine = sending.result()
            told = ranks.allgather({name: (r.size, r.hash) for name, r in mine.items()})
            records = {name: FileRecord(*each) for part in told for name, each in part.items()}
            with ranks.together(_NOT_STORED):
                if ranks.is_chief:
                    self._commit(draft.uuid, steps, plain_metadata(sending.metadata), records)
        except BaseException:
            self.abandon(draft)
            raise
        if ranks.local_rank == 0:
            self._store.keep_copy(draft.uuid)

    @contextmanager
    def blaming_storage(self) -> Iterator[None]:
        """Tell a failure of the storage from one of the code in the block, which writes to it.

        Not every library says that the disk was full; whether it is can be found out.

        Raises:
            StorageError: In place of another error, if the storage cannot be written now.
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
        """Remove what was written; only when every rank knows that it is to be."""
        if self._ranks.is_chief:
            self._store.abort(draft.uuid)
        elif self._store.is_remote and self._ranks.local_rank == 0:
            self._store.drop(draft.uuid)

    def _share_of(self, draft: Draft) -> list[str]:
        """Of the files in a directory that a machine's ranks share, those that this one brings up.

        The largest first, each rank every n-th: so all have about as much to do.
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
            msg = "another run has taken this trial over; its checkpoint is dropped"
            raise StaleRunError(msg)
        stored = self._store.commit(name, steps, metadata, records)
        if self._reporter is not None:
            self._reporter.report_checkpoint(name, steps, stored.resources, metadata)
        logger.info("checkpoint %s after batch %d", name, steps)

    def _merge(self, draft: Draft, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Bring the parts of all ranks together. **Collective**.

        Returns:
            The metadata of all, and this rank's files: of those that several have written alike,
            the first one's.
        """
        ranks, names, mine = self._ranks, list[str](), dict[str, Any]()
        with ranks.together(_NOT_STORED):
            names, mine = list_files(draft.path), plain_metadata(metadata)
        everyones = ranks.allgather([names, mine], "comparing the parts of a checkpoint")
        files = [set(of_rank) for of_rank, _ in everyones]
        hashes: dict[str, str] = {}
        with ranks.together(_NOT_STORED):
            for name in names:
                if sum(name in of_rank for of_rank in files) > 1:
                    hashes[name] = file_hash(draft.path / name)
        compared = ranks.allgather(hashes, "comparing files of the same name")
        problems: list[str] = []
        merged: dict[str, Any] = {}
        for rank, (_, details) in enumerate(everyones):
            merged = merge_metadata(merged, details, rank, problems)
        problems += _conflicts(compared) + _files_and_folders(files)
        if problems:
            raise ConfigError(f"{_NOT_STORED}, for its ranks contradict each other", problems)
        with ranks.together(_NOT_STORED):
            self._store.merge(draft.uuid, ranks.rank)
        before = set().union(*files[: ranks.rank])
        first = [name for name in names if name not in before]
        return merged, first if self._store.is_remote else []


@dataclass
class Sending:
    """Files of a draft on their way to an object store."""

    store: CheckpointStore
    draft: Draft
    files: list[str]
    """Those that this rank brings up."""
    metadata: dict[str, Any]
    """Of the whole checkpoint."""
    _records: dict[str, FileRecord] = field(default_factory=dict)
    _error: Exception | None = None
    _thread: Thread | None = None

    def start(self) -> None:
        """Begin to bring the files up, in a thread of their own."""
        if self.store.is_remote:
            name = f"upload {self.draft.uuid}"
            # A run that fails does not wait for it: the next one sweeps up what it has left.
            self._thread = Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank's part is over, well or badly."""
        return self._thread is None or not self._thread.is_alive()

    def wait_for(self, timeout_s: float) -> bool:
        """Wait for this rank's part; return whether it is over."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.done

    def result(self) -> dict[str, FileRecord]:
        """Return what this rank has brought up; only when it is :attr:`done`.

        Raises:
            StorageError: If the storage did not take it.
        """
        if self._error is not None:
            raise self._error
        return self._records

    def _run(self) -> None:
        try:
            self.store.announce(self.draft.uuid)
            self._records = self.store.upload(self.draft.uuid, self.files)
        except Exception as error:  # noqa: BLE001 - raised by wait(), on every rank
            self._error = error


def merge_metadata(
    merged: Mapping[str, Any],
    more: Mapping[str, Any],
    rank: int,
    problems: list[str],
    prefix: str = "metadata",
) -> dict[str, Any]:
    """Add what a rank says to what the ranks before it have said, mapping by mapping.

    Args:
        merged: Of the ranks before.
        more: Of this rank.
        rank: This rank.
        problems: Gets a line for every key that has two values.
        prefix: Of the keys in those lines.
    """
    result = dict(merged)
    for key, value in more.items():
        known = result.get(key)
        name = f"{prefix}.{key}"
        if key not in result:
            result[key] = value
        elif isinstance(known, Mapping) and isinstance(value, Mapping):
            result[key] = merge_metadata(known, value, rank, problems, name)
        elif known != value or type(known) is not type(value):
            problems.append(
                f"{name}: must be the same wherever it is given, got {value!r} on rank {rank} "
                f"and {known!r} on a rank before it; give it on one rank"
            )
    return result


def _files_and_folders(files: Sequence[set[str]]) -> list[str]:
    """Say which names are a file of one rank and a folder of another."""
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
    """One line for every file that two ranks have written with different content."""
    problems = []
    for name in sorted({name for of_rank in hashes for name in of_rank}):
        writers = [rank for rank, of_rank in enumerate(hashes) if name in of_rank]
        if len({hashes[rank][name] for rank in writers}) > 1:
            problems.append(
                f"{name}: ranks {', '.join(map(str, writers))} have written different content; "
                "put the rank into its name"
            )
    return problems
