"""What users remove: checkpoints, files of checkpoints, and what a changed policy keeps no more.

All of what is asked for goes, or nothing: a checkpoint that something still needs is named, with
what needs it. A dry run says what would go.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from sqlalchemy import RowMapping, select, update

from zerolab.errors import ConfigError, ConflictError, NotFoundError
from zeroserver.orchestrator.checkpoints.registry import versions_of
from zeroserver.orchestrator.checkpoints.retention import (
    forget_names,
    let_go,
    not_kept,
)
from zeroserver.orchestrator.checkpoints.short_uuids import full_uuid
from zeroserver.orchestrator.state import World, find, save, storage_of, touch
from zeroserver.orchestrator.warm_start import needed_for_warm_start
from zeroserver.states import TRIAL_ENDED
from zeroserver.store.database import Transaction
from zeroserver.store.janitor import Chore
from zeroserver.store.schema import checkpoints, experiments, trials

__all__ = ["Going", "collect", "remove_checkpoints"]

_THERE = ("COMPLETED", "PARTIAL")


@dataclass(frozen=True)
class Going:
    """A checkpoint that is removed, or some files of it."""

    row: RowMapping
    files: list[str]
    """Those that go, in order."""
    whole: bool

    @property
    def size(self) -> int:
        """Bytes that become free."""
        sizes: dict[str, int] = msgspec.json.decode(self.row["resources"])
        return sum(sizes[name] for name in self.files)


def remove_checkpoints(
    world: World,
    transaction: Transaction,
    uuids: Sequence[str],
    globs: Sequence[str] = (),
    *,
    dry_run: bool = False,
) -> list[Going]:
    """Remove checkpoints, or those files of them that match a pattern.

    Args:
        world: Of the orchestrator.
        transaction: Of the writer.
        uuids: Of the checkpoints; those that are gone already are left out of the answer.
        globs: Patterns of paths inside a checkpoint; none for all of it.
        dry_run: Only say what would go.

    Raises:
        NotFoundError: If there is no such checkpoint.
        ConflictError: If something needs one of them.
    """
    wanted = list(dict.fromkeys(full_uuid(transaction.connection, uuid) for uuid in uuids))
    query = select(checkpoints).where(checkpoints.c.uuid.in_(wanted)).order_by(checkpoints.c.id)
    rows = transaction.connection.execute(query).mappings().all()
    missing = set(wanted) - {row["uuid"] for row in rows}
    if missing:
        raise NotFoundError(f"there is no checkpoint {', '.join(sorted(missing))}")
    rows = [row for row in rows if row["state"] in _THERE]
    going = [_going(row, globs) for row in rows]
    going = [each for each in going if each.files or each.whole]
    _refuse_needed(transaction, [each.row for each in going])
    if not dry_run:
        whole: dict[int, list[str]] = {}
        for each in going:
            if each.whole:
                whole.setdefault(each.row["experiment_id"], []).append(each.row["uuid"])
            else:
                _remove_files(world, transaction, each)
        for experiment_id, gone in whole.items():
            let_go(world, transaction, experiment_id, gone)
    return going


def _going(row: RowMapping, globs: Sequence[str]) -> Going:
    names = sorted(msgspec.json.decode(row["resources"]))
    if not globs:
        return Going(row, names, whole=True)
    matching = [name for name in names if any(fnmatch.fnmatchcase(name, one) for one in globs)]
    return Going(row, matching, whole=bool(names) and len(matching) == len(names))


def _refuse_needed(transaction: Transaction, rows: Sequence[RowMapping]) -> None:
    """Raise ConflictError if something needs one of the checkpoints."""
    by_uuid = {row["uuid"]: row for row in rows}
    query = select(trials.c.id, trials.c.state, trials.c.latest_checkpoint).where(
        trials.c.latest_checkpoint.in_(by_uuid), trials.c.state.not_in(TRIAL_ENDED)
    )
    problems = [
        f"checkpoint {row.latest_checkpoint}: trial {row.id}, which is {row.state}, goes on from it"
        for row in transaction.connection.execute(query)
    ]
    needed = set(transaction.connection.scalars(needed_for_warm_start()))
    problems += [
        f"checkpoint {uuid}: a trial will begin with its weights"
        for uuid in by_uuid
        if uuid in needed
    ]
    problems += [
        f"checkpoint {uuid}: is version {version} of model {name}; `zerolab model remove-version "
        f"{name} {version}` first"
        for uuid, (name, version) in versions_of(transaction, list(by_uuid)).items()
    ]
    if problems:
        raise ConflictError("; ".join([*problems, "nothing was removed"]))


def _remove_files(world: World, transaction: Transaction, going: Going) -> None:
    row = going.row
    sizes: dict[str, int] = msgspec.json.decode(row["resources"])
    left = {name: size for name, size in sizes.items() if name not in set(going.files)}
    transaction.connection.execute(
        update(checkpoints)
        .where(checkpoints.c.id == row["id"])
        .values(
            state="PARTIAL",
            resources=msgspec.json.encode(left).decode(),
            size_bytes=sum(left.values()),
        )
    )
    forget_names(transaction, row["experiment_id"], [row["uuid"]])
    storage = storage_of(world, transaction, row["experiment_id"])
    chore = Chore(storage=storage, name=row["uuid"], files=going.files)
    world.janitor.discard(transaction, chore)
    touch(transaction, "checkpoint", row["experiment_id"], row["uuid"])


def collect(
    world: World,
    transaction: Transaction,
    experiment_id: int,
    policy: Mapping[str, int],
    *,
    dry_run: bool = False,
) -> list[Going]:
    """Give an experiment another policy, and remove what it does not keep.

    Args:
        world: Of the orchestrator.
        transaction: Of the writer.
        experiment_id: Whose checkpoints.
        policy: Those of the keys ``save_...`` that are to change.
        dry_run: Only say what would go; the policy stays.

    Raises:
        NotFoundError: If there is no such experiment.
        ConfigError: If a key is none of the policy's.
    """
    experiment = find(transaction, experiments, experiment_id)
    config = world.config(transaction, experiment_id)
    unknown = set(policy) - {"save_experiment_best", "save_trial_best", "save_trial_latest"}
    if unknown:
        raise ConfigError("policy", [f"{name}: unknown key" for name in sorted(unknown)])
    chosen = config.checkpoint_storage.model_copy(update=dict(policy))
    if policy and not dry_run:
        stored = msgspec.json.decode(experiment["config"])
        stored["checkpoint_storage"] |= dict(policy)
        save(transaction, experiments, experiment_id, config=msgspec.json.encode(stored).decode())
        world.forget_config(experiment_id)
        transaction.undo.append(partial(world.forget_config, experiment_id))
        touch(transaction, "experiment", experiment_id, experiment_id)
    uuids = not_kept(transaction, experiment, chosen, checkpoints.c.experiment_id == experiment_id)
    query = select(checkpoints).where(checkpoints.c.uuid.in_(uuids)).order_by(checkpoints.c.id)
    going = [_going(row, ()) for row in transaction.connection.execute(query).mappings()]
    if not dry_run:
        let_go(world, transaction, experiment_id, uuids)
    return going
