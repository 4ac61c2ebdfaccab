"""The one way to a checkpoint: all ranks write, then it appears, is reported, or is nowhere.

::

    draft = saver.begin()                  a name and a place, the same on all ranks
    ... every rank writes below draft.path
    saver.publish(draft, steps, metadata)  complete, renamed, told to the server; or an error on all

Files of a draft are removed by the chief alone, and only when every rank has said that it writes
no more. What a death leaves behind, the trial's next run sweeps up.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolab.core.store import CheckpointStore, list_files, new_uuid
from zerolab.errors import ConfigError, StaleRunError, StorageError, is_storage_failure
from zerolab.ranks import Ranks
from zerolab.reports.reporter import Reporter, plain_metadata

__all__ = ["CheckpointSaver", "Draft", "merge_metadata"]

logger = logging.getLogger(__name__)

_NOT_STORED = "checkpoint: not stored"


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
        """Make a checkpoint appear, complete, and report it. **Collective**.

        Nothing is left of it when this fails, on any rank.

        Args:
            draft: From :meth:`begin`; every rank has written its part.
            steps: Batches (optimizer steps) that it holds.
            metadata: Anything that JSON can hold. Where ranks write apart, what all of them say
                is merged; else the chief's counts.

        Raises:
            ConfigError: On all ranks, if ranks contradict each other in files or metadata.
            StaleRunError: On all ranks, if another run has taken over.
            StorageError: On all ranks, if the storage cannot take it.
        """
        try:
            if draft.apart:
                metadata = self._merge(draft, metadata)
            else:
                self._ranks.barrier(f"finishing the checkpoint after batch {steps}")
            with self._ranks.together(_NOT_STORED):
                if self._ranks.is_chief:
                    self._commit(draft.uuid, steps, plain_metadata(metadata))
        except BaseException:
            self.abandon(draft)
            raise

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

    def _commit(self, name: str, steps: int, metadata: Mapping[str, Any]) -> None:
        if self._reporter is not None and self._reporter.stale.is_set():
            msg = "another run has taken this trial over; its checkpoint is dropped"
            raise StaleRunError(msg)
        stored = self._store.commit(name, steps, metadata)
        if self._reporter is not None:
            self._reporter.report_checkpoint(name, steps, stored.resources, metadata)
        logger.info("checkpoint %s after batch %d", name, steps)

    def _merge(self, draft: Draft, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Bring the parts of all ranks together; return the metadata of all. **Collective**."""
        ranks, names, mine = self._ranks, list[str](), dict[str, Any]()
        with ranks.together(_NOT_STORED):
            names, mine = list_files(draft.path), plain_metadata(metadata)
        everyones = ranks.allgather([names, mine], "comparing the parts of a checkpoint")
        files = [set(of_rank) for of_rank, _ in everyones]
        hashes: dict[str, str] = {}
        with ranks.together(_NOT_STORED):
            for name in names:
                if sum(name in of_rank for of_rank in files) > 1:
                    hashes[name] = _hash(draft.path / name)
        compared = ranks.allgather(hashes, "comparing files of the same name")
        problems: list[str] = []
        merged: dict[str, Any] = {}
        for rank, (_, details) in enumerate(everyones):
            merged = merge_metadata(merged, details, rank, problems)
        problems += _conflicts(compared)
        if problems:
            raise ConfigError(f"{_NOT_STORED}, for its ranks contradict each other", problems)
        with ranks.together(_NOT_STORED):
            self._store.merge(draft.uuid, ranks.rank)
        return merged


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


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
