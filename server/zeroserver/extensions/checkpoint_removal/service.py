"""Removal of checkpoints and their files by users, and under a changed retention policy.

A request is all or nothing: if something needs one of the checkpoints, the error names both.
Requests for many checkpoints take several transactions; they are checked before the first one and
again in each.
"""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, select

from zerolab.errors import ConflictError, NotFoundError
from zeroserver.orchestrator.checkpoints.checkpoint_service import (
    AT_ONCE,
    CheckpointService,
    not_kept,
)
from zeroserver.orchestrator.checkpoints.model_service import versions_of
from zeroserver.orchestrator.search.warm_start import needed_for_warm_start
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.orchestrator.state import config_of
from zeroserver.states import TRIAL_ENDED
from zeroserver.store.janitor import Chore
from zeroserver.store.rows import CheckpointRow, ExperimentRow, find_row, read_rows
from zeroserver.store.schema import checkpoints, experiments, trials
from zeroserver.store.short_uuids import full_uuid

__all__ = [
    "CheckpointRemovalService",
    "Going",
    "T",
    "batched",
    "checkpoints_to_remove",
    "removed",
    "unkept",
]

T = TypeVar("T")
_THERE = ("COMPLETED", "PARTIAL")


class Going(msgspec.Struct, frozen=True):
    """Checkpoint to be removed, or some of its files."""

    row: CheckpointRow
    files: list[str]
    """Files to remove, sorted."""
    whole: bool

    @property
    def size(self) -> int:
        """Number of bytes freed."""
        sizes: dict[str, int] = msgspec.json.decode(self.row.resources)
        return sum(sizes[name] for name in self.files)


_LEFT = "UPDATE checkpoints SET state = 'PARTIAL', resources = ?, size_bytes = ? WHERE id = ?"


class CheckpointRemovalService(Service):
    """Removes checkpoints or files of them at the request of users."""

    checkpoints = Uses(CheckpointService)

    def remove(
        self,
        uuids: Sequence[str],
        globs: Sequence[str] = (),
        *,
        removed: int = 0,
    ) -> list[Going]:
        """Remove checkpoints, or files of them: see :func:`checkpoints_to_remove`.

        Args:
            uuids: Checkpoints to remove; at most AT_ONCE in one transaction.
            globs: Patterns of paths inside a checkpoint; empty for the whole checkpoint.
            removed: Number of checkpoints removed by earlier transactions of the request.

        Raises:
            NotFoundError: If there is no such checkpoint.
            ConflictError: If something needs one of them.
        """
        removals = checkpoints_to_remove(self.work.connection, uuids, globs, removed=removed)
        by_experiment: dict[int, list[Going]] = {}
        for removal in removals:
            by_experiment.setdefault(removal.row.experiment_id, []).append(removal)
        for experiment_id, of_experiment in by_experiment.items():
            complete = [removal.row.uuid for removal in of_experiment if removal.whole]
            self.checkpoints.delete(experiment_id, complete)
            self._remove_files(
                experiment_id, [removal for removal in of_experiment if not removal.whole]
            )
        return removals

    def _remove_files(self, experiment_id: int, going: Sequence[Going]) -> None:
        """Remove some files of checkpoints of an experiment."""
        if not going:
            return
        storage = self.work.storage_of(experiment_id)
        rows: list[tuple[str, int, int]] = []
        chores: list[Chore] = []
        for removal in going:
            files = set(removal.files)
            sizes: dict[str, int] = msgspec.json.decode(removal.row.resources)
            remaining = {name: size for name, size in sizes.items() if name not in files}
            encoded = msgspec.json.encode(remaining).decode()
            rows.append((encoded, sum(remaining.values()), removal.row.id))
            chores.append(Chore(storage=storage, name=removal.row.uuid, files=removal.files))
            self.work.touch("checkpoint", experiment_id, removal.row.uuid)
        self.work.many(_LEFT, rows)
        self.checkpoints.forget_deleted(experiment_id, [removal.row.uuid for removal in going])
        self.work.orchestrator.janitor.discard(self.work, *chores)

    def set_policy(self, experiment_id: int, policy: Mapping[str, int]) -> None:
        """Change an experiment's retention policy and schedule its application.

        Args:
            experiment_id: The experiment.
            policy: Keys ``save_...`` to change, with their new values.

        Raises:
            NotFoundError: If there is no such experiment.
        """
        experiment = self.work.find(ExperimentRow, experiment_id)
        if policy:
            stored = msgspec.json.decode(experiment.config)
            stored["checkpoint_storage"] |= dict(policy)
            self.work.save(experiments, experiment_id, config=msgspec.json.encode(stored).decode())
            self.work.orchestrator.configs.forget(experiment_id)
            self.work.undo.append(partial(self.work.orchestrator.configs.forget, experiment_id))
            self.work.touch("experiment", experiment_id, experiment_id)
        self.checkpoints.mark_due(experiment_id)


def checkpoints_to_remove(
    connection: Connection, uuids: Sequence[str], globs: Sequence[str] = (), *, removed: int = 0
) -> list[Going]:
    """Return the checkpoints or files that a removal request would remove.

    Args:
        connection: Connection for reading.
        uuids: Checkpoints to remove; already deleted ones are skipped.
        globs: Patterns of paths inside a checkpoint; empty for the whole checkpoint.
        removed: Number of checkpoints removed by earlier transactions of the request.

    Raises:
        NotFoundError: If there is no such checkpoint.
        ConflictError: If something needs one of them.
    """
    exact = {row.uuid for row in _rows(connection, uuids)}
    full_uuids = [uuid if uuid in exact else full_uuid(connection, uuid) for uuid in uuids]
    rows = _rows(connection, full_uuids)
    missing = set(full_uuids) - {row.uuid for row in rows}
    if missing:
        raise NotFoundError(f"there is no checkpoint {', '.join(sorted(missing))}")
    removals = [_going(row, globs) for row in rows if row.state in _THERE]
    removals = [removal for removal in removals if removal.files or removal.whole]
    outcome = f"{removed} others were removed" if removed else "nothing was removed"
    _refuse_needed(connection, [removal.row for removal in removals], outcome)
    return removals


def _rows(connection: Connection, uuids: Iterable[str]) -> list[CheckpointRow]:
    """Return the checkpoints with these uuids, ordered by id."""
    rows: list[CheckpointRow] = []
    for batch in batched(dict.fromkeys(uuids), AT_ONCE):
        query = select(checkpoints).where(checkpoints.c.uuid.in_(batch))
        rows += read_rows(connection, CheckpointRow, query)
    return sorted(rows, key=lambda row: int(row.id))


def batched(things: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of at most ``size`` items."""
    iterator = iter(things)
    while batch := list(islice(iterator, size)):
        yield batch


def _going(row: CheckpointRow, globs: Sequence[str]) -> Going:
    names = sorted(msgspec.json.decode(row.resources))
    if not globs:
        return Going(row, names, whole=True)
    matching = [name for name in names if any(fnmatch.fnmatchcase(name, file) for file in globs)]
    return Going(row, matching, whole=bool(names) and len(matching) == len(names))


def _refuse_needed(connection: Connection, rows: Sequence[CheckpointRow], outcome: str) -> None:
    """Raise ConflictError if something needs one of the checkpoints."""
    by_uuid = {row.uuid: row for row in rows}
    problems: list[str] = []
    for batch in batched({row.trial_id for row in rows}, AT_ONCE):
        query = select(trials.c.id, trials.c.state, trials.c.latest_checkpoint).where(
            trials.c.id.in_(batch), trials.c.state.not_in(TRIAL_ENDED)
        )
        problems += [
            f"checkpoint {row.latest_checkpoint}: trial {row.id}, which is {row.state}, continues "
            "from it"
            for row in connection.execute(query)
            if row.latest_checkpoint in by_uuid
        ]
    needed: set[Any] = set(connection.scalars(needed_for_warm_start()))
    problems += [
        f"checkpoint {uuid}: a trial will start with its weights"
        for uuid in by_uuid
        if uuid in needed
    ]
    problems += [
        f"checkpoint {uuid}: is version {version} of model {name}; `zerolab model delete-version "
        f"{name} {version}` first"
        for batch in batched(by_uuid, AT_ONCE)
        for uuid, (name, version) in versions_of(connection, batch).items()
    ]
    if problems:
        raise ConflictError("; ".join([*problems, outcome]))


def unkept(connection: Connection, experiment_id: int, policy: Mapping[str, int]) -> list[Going]:
    """Return the checkpoints that another retention policy would remove.

    Args:
        connection: Connection for reading.
        experiment_id: The experiment.
        policy: Keys ``save_...`` to change, with their new values.

    Raises:
        NotFoundError: If there is no such experiment.
    """
    experiment = find_row(connection, ExperimentRow, experiment_id)
    chosen = config_of(experiment).checkpoint_storage.model_copy(update=dict(policy))
    of_experiment = checkpoints.c.experiment_id == experiment_id
    deleted = not_kept(connection, experiment, chosen, of_experiment)
    return [_going(row, ()) for row in _rows(connection, [row.uuid for row in deleted])]


def removed(connection: Connection, uuids: Sequence[str]) -> list[Going]:
    """Return the removals of whole checkpoints, for the response to a request."""
    return [_going(row, ()) for row in _rows(connection, uuids)]
