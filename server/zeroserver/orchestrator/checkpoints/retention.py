"""Which checkpoints are kept: the policy of ``checkpoint_storage``, applied as new ones come.

A checkpoint is kept as one of the latest or the best of its trial, as one of the best of its
experiment, or as a version of a model; and the latest checkpoint of a trial that has not ended is
always kept, validated or not. What a trial reports moves its own checkpoints alone, unless one of
them enters the best of the experiment: then one of any other trial, ended or not, may have lost its
place.

The files go after the commit (:mod:`zeroserver.store.janitor`).
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    RowMapping,
    Select,
    func,
    select,
    update,
)

from zeroserver.orchestrator.checkpoints.best import best_checkpoints, searcher_metric_at
from zeroserver.orchestrator.checkpoints.registry import registered
from zeroserver.orchestrator.state import (
    Fields,
    config_of,
    owner_of,
)
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.orchestrator.warm_start import needed_for_warm_start
from zeroserver.states import TRIAL_ENDED
from zeroserver.store.janitor import Chore
from zeroserver.store.rows import one
from zeroserver.store.schema import checkpoints, experiments, points, trials

if TYPE_CHECKING:  # loaded when the first experiment comes
    from zerolab.config.experiment.storage import CheckpointStorageConfig

__all__ = [
    "AT_ONCE",
    "apply_after_report",
    "apply_to_experiment",
    "apply_to_trial",
    "discard_unfinished",
    "due_experiments",
    "forget_names",
    "let_go",
    "mark_due",
    "not_kept",
    "settle_due",
    "thin_out",
    "trials_to_thin",
]

AT_ONCE = 1000
"""Checkpoints that one change deletes."""


def apply_to_trial(work: UnitOfWork, trial_id: int) -> None:
    """Delete the checkpoints of a trial that the experiment's policy does not keep."""
    trial = work.find(trials, trial_id)
    _apply(work, trial["experiment_id"], checkpoints.c.trial_id == trial_id)


def apply_to_experiment(work: UnitOfWork, experiment_id: int) -> None:
    """Delete the checkpoints of all trials that the experiment's policy does not keep.

    If there are many, later changes do it: see :func:`mark_due`.
    """
    if work.raw(_MANY, (experiment_id, AT_ONCE)):
        mark_due(work, experiment_id)
    else:
        _apply(work, experiment_id, checkpoints.c.experiment_id == experiment_id)


_MANY = "SELECT 1 FROM checkpoints WHERE experiment_id = ? AND state = 'COMPLETED' LIMIT 1 OFFSET ?"


def mark_due(work: UnitOfWork, experiment_id: int) -> None:
    """Have the policy applied to all checkpoints of an experiment in later changes.

    It is stored, so that the next server goes on if this one dies before.
    """
    if experiment_id in work.orchestrator.retention:
        return
    work.save(experiments, experiment_id, retention_due=1)
    work.orchestrator.retention.add(experiment_id)
    work.undo.append(lambda: work.orchestrator.retention.discard(experiment_id))


def due_experiments(connection: Connection) -> list[int]:
    """Return the experiments to whose checkpoints the policy must still be applied."""
    query = select(experiments.c.id).where(experiments.c.retention_due == 1)
    return list(connection.scalars(query.order_by(experiments.c.id)))


def settle_due(work: UnitOfWork, experiment_id: int) -> None:
    """Note that the policy was applied to all checkpoints, unless it is due again."""
    if experiment_id not in work.orchestrator.retention:
        work.save(experiments, experiment_id, retention_due=0)


def trials_to_thin(connection: Connection, experiment_id: int) -> list[list[int]]:
    """Return the trials with checkpoints that the policy does not keep, in parts for one change."""
    experiment = one(connection, experiments, experiment_id)
    policy = config_of(experiment).checkpoint_storage
    everyone = checkpoints.c.experiment_id == experiment_id
    parts: list[list[int]] = []
    size = AT_ONCE
    for trial_id, count in Counter(
        row.trial_id for row in not_kept(connection, experiment, policy, everyone)
    ).items():
        if size + count > AT_ONCE:
            parts.append([])
            size = 0
        parts[-1].append(trial_id)
        size += count
    return parts


def thin_out(work: UnitOfWork, experiment_id: int, trial_ids: Sequence[int]) -> list[str]:
    """Delete checkpoints of some trials that the policy does not keep, at most AT_ONCE of them.

    Returns:
        The uuids of those that were deleted.
    """
    experiment = work.find(experiments, experiment_id)
    policy = work.config(experiment_id).checkpoint_storage
    whose = checkpoints.c.trial_id.in_(trial_ids)
    gone = not_kept(work.connection, experiment, policy, whose)
    uuids = [row.uuid for row in gone[:AT_ONCE]]
    let_go(work, experiment_id, uuids)
    return uuids


def apply_after_report(work: UnitOfWork, trial_id: int, steps: int) -> None:
    """Apply the policy as far as a checkpoint, or a validation, at ``steps`` changes anything."""
    trial = work.find(trials, trial_id)
    experiment = work.experiment_of(trial)
    policy = work.config(experiment["id"]).checkpoint_storage
    best = _best(work.connection, experiment, policy)
    if any((row["trial_id"], row["steps_completed"]) == (trial_id, steps) for row in best):
        apply_to_experiment(work, experiment["id"])
    else:
        _apply(work, experiment["id"], checkpoints.c.trial_id == trial_id)


def discard_unfinished(work: UnitOfWork, trial: Fields) -> None:
    """Have what a trial's runs died over while saving removed: no run of it will come."""
    storage = work.storage_of(trial["experiment_id"])
    chore = Chore(storage=storage, owner=owner_of(work.orchestrator, trial["id"]))
    work.orchestrator.janitor.discard(work, chore)


def _apply(work: UnitOfWork, experiment_id: int, where: ColumnElement[bool]) -> None:
    experiment = work.find(experiments, experiment_id)
    policy = work.config(experiment_id).checkpoint_storage
    gone = not_kept(work.connection, experiment, policy, where)
    let_go(work, experiment_id, [row.uuid for row in gone])


def not_kept(
    connection: Connection,
    experiment: RowMapping,
    policy: "CheckpointStorageConfig",
    where: ColumnElement[bool],
) -> list[Row[Any]]:
    """Return the checkpoints that a policy does not keep, and that nothing needs.

    Args:
        connection: Only read from.
        experiment: Whose they are.
        policy: How many are kept.
        where: Which checkpoints are looked at; of a trial all or none.
    """
    kept = {row["uuid"] for row in _best(connection, experiment, policy)}
    gone = []
    for row in connection.execute(_ranked(experiment, where)):
        running = row.trial_state not in TRIAL_ENDED
        if (
            row.uuid not in kept
            and row.age > policy.save_trial_latest
            and (row.value is None or row.rank > policy.save_trial_best)
            and not (running and (row.age == 1 or row.uuid == row.latest_checkpoint))
        ):
            gone.append(row)
    if gone:
        needed = set(connection.scalars(needed_for_warm_start()))
        needed.update(connection.scalars(registered()))
        gone = [row for row in gone if row.uuid not in needed]
    return gone


def let_go(work: UnitOfWork, experiment_id: int, uuids: Sequence[str]) -> None:
    """Delete checkpoints of an experiment; their files go after the commit."""
    if not uuids:
        return
    work.connection.execute(
        update(checkpoints).where(checkpoints.c.uuid.in_(uuids)).values(state="DELETED")
    )
    storage = work.storage_of(experiment_id)
    for uuid in uuids:
        work.touch("checkpoint", experiment_id, uuid)
    work.orchestrator.janitor.discard(work, *(Chore(storage=storage, name=uuid) for uuid in uuids))
    forget_names(work, experiment_id, uuids)


def _ranked(experiment: RowMapping, where: ColumnElement[bool]) -> "Select[Any]":
    """Checkpoints with their places in their trials: ``age`` 1 is the latest, ``rank`` 1 the best.

    Only among those that have a value does ``rank`` mean anything.
    """
    columns = checkpoints.c
    value = points.c.value.asc() if experiment["smaller_is_better"] else points.c.value.desc()
    age = func.row_number().over(
        partition_by=columns.trial_id, order_by=(columns.steps_completed.desc(), columns.id.desc())
    )
    rank = func.row_number().over(
        partition_by=columns.trial_id, order_by=(points.c.value.is_(None), value, columns.id)
    )
    return (
        select(
            columns.id,
            columns.uuid,
            columns.trial_id,
            trials.c.state.label("trial_state"),
            trials.c.latest_checkpoint,
            points.c.value,
            age.label("age"),
            rank.label("rank"),
        )
        .select_from(checkpoints)
        .join(trials, trials.c.id == columns.trial_id)
        .outerjoin(points, searcher_metric_at(experiment))
        .where(where, columns.state == "COMPLETED")
        .order_by(columns.id)
    )


def _best(
    connection: Connection, experiment: RowMapping, policy: "CheckpointStorageConfig"
) -> list[RowMapping]:
    """Return the checkpoints that are kept as the experiment's best."""
    count = policy.save_experiment_best
    if count == 0:
        return []
    mine = checkpoints.c.experiment_id == experiment["id"]
    query = best_checkpoints(experiment).where(mine).limit(count)
    return list(connection.execute(query).mappings())


def forget_names(work: UnitOfWork, experiment_id: int, gone: Sequence[str]) -> None:
    """Let trials not name checkpoints that are gone; the next best takes the best one's place."""
    experiment = work.find(experiments, experiment_id)
    next_best = (
        best_checkpoints(experiment)
        .with_only_columns(checkpoints.c.uuid)
        .where(checkpoints.c.trial_id == trials.c.id)
        .correlate(trials)
        .limit(1)
        .scalar_subquery()
    )
    for column, value in (
        (trials.c.latest_checkpoint, None),
        (trials.c.best_checkpoint, next_best if experiment["metric"] else None),
    ):
        work.connection.execute(
            update(trials)
            .where(trials.c.experiment_id == experiment_id, column.in_(gone))
            .values({column.name: value})
        )
