"""Which checkpoints are kept: the policy of ``checkpoint_storage``, applied as new ones come.

A checkpoint is kept as one of the latest or the best of its trial, as one of the best of its
experiment, or as a version of a model; and the latest checkpoint of a trial that has not ended is
always kept, validated or not. What a trial reports moves its own checkpoints alone, unless one of
them enters the best of the experiment: then one of any other trial, ended or not, may have lost its
place.

The files go after the commit (:mod:`zeroserver.store.janitor`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, RowMapping, Select, func, select, update

from zeroserver.orchestrator.checkpoints.best import best_checkpoints, searcher_metric_at
from zeroserver.orchestrator.checkpoints.registry import registered
from zeroserver.orchestrator.state import (
    Fields,
    World,
    experiment_of,
    find,
    owner_of,
    storage_of,
    touch,
)
from zeroserver.orchestrator.warm_start import needed_for_warm_start
from zeroserver.states import TRIAL_ENDED
from zeroserver.store.database import Transaction
from zeroserver.store.janitor import Chore
from zeroserver.store.schema import checkpoints, experiments, points, trials

if TYPE_CHECKING:  # loaded when the first experiment comes
    from zerolab.config.experiment.storage import CheckpointStorageConfig

__all__ = [
    "apply_after_report",
    "apply_to_experiment",
    "apply_to_trial",
    "discard_unfinished",
    "forget_names",
    "let_go",
    "not_kept",
]


def apply_to_trial(world: World, transaction: Transaction, trial_id: int) -> None:
    """Delete the checkpoints of a trial that the experiment's policy does not keep."""
    trial = find(transaction, trials, trial_id)
    _apply(world, transaction, trial["experiment_id"], checkpoints.c.trial_id == trial_id)


def apply_to_experiment(world: World, transaction: Transaction, experiment_id: int) -> None:
    """Delete the checkpoints of all trials that the experiment's policy does not keep."""
    _apply(world, transaction, experiment_id, checkpoints.c.experiment_id == experiment_id)


def apply_after_report(world: World, transaction: Transaction, trial_id: int, steps: int) -> None:
    """Apply the policy as far as a checkpoint, or a validation, at ``steps`` changes anything."""
    trial = find(transaction, trials, trial_id)
    experiment = experiment_of(transaction, trial)
    policy = world.config(transaction, experiment["id"]).checkpoint_storage
    best = _best(transaction, experiment, policy)
    entered = any((row["trial_id"], row["steps_completed"]) == (trial_id, steps) for row in best)
    everyone = checkpoints.c.experiment_id == experiment["id"]
    mine = checkpoints.c.trial_id == trial_id
    _apply(world, transaction, experiment["id"], everyone if entered else mine)


def discard_unfinished(world: World, transaction: Transaction, trial: Fields) -> None:
    """Have what a trial's runs died over while saving removed: no run of it will come."""
    storage = storage_of(world, transaction, trial["experiment_id"])
    chore = Chore(storage=storage, owner=owner_of(world, trial["id"]))
    world.janitor.discard(transaction, chore)


def _apply(
    world: World, transaction: Transaction, experiment_id: int, where: ColumnElement[bool]
) -> None:
    experiment = find(transaction, experiments, experiment_id)
    policy = world.config(transaction, experiment_id).checkpoint_storage
    let_go(world, transaction, experiment_id, not_kept(transaction, experiment, policy, where))


def not_kept(
    transaction: Transaction,
    experiment: RowMapping,
    policy: "CheckpointStorageConfig",
    where: ColumnElement[bool],
) -> list[str]:
    """Return the uuids of checkpoints that a policy does not keep, and that nothing needs.

    Args:
        transaction: Of the writer.
        experiment: Whose they are.
        policy: How many are kept.
        where: Which checkpoints are looked at; of a trial all or none.
    """
    kept = {row["uuid"] for row in _best(transaction, experiment, policy)}
    gone = []
    for row in transaction.connection.execute(_ranked(experiment, where)):
        running = row.trial_state not in TRIAL_ENDED
        if (
            row.uuid not in kept
            and row.age > policy.save_trial_latest
            and (row.value is None or row.rank > policy.save_trial_best)
            and not (running and (row.age == 1 or row.uuid == row.latest_checkpoint))
        ):
            gone.append(row.uuid)
    if gone:
        needed = set(transaction.connection.scalars(needed_for_warm_start()))
        needed.update(transaction.connection.scalars(registered()))
        gone = [uuid for uuid in gone if uuid not in needed]
    return gone


def let_go(
    world: World, transaction: Transaction, experiment_id: int, uuids: Sequence[str]
) -> None:
    """Delete checkpoints of an experiment; their files go after the commit."""
    if not uuids:
        return
    transaction.connection.execute(
        update(checkpoints).where(checkpoints.c.uuid.in_(uuids)).values(state="DELETED")
    )
    storage = storage_of(world, transaction, experiment_id)
    for uuid in uuids:
        touch(transaction, "checkpoint", experiment_id, uuid)
    world.janitor.discard(transaction, *(Chore(storage=storage, name=uuid) for uuid in uuids))
    forget_names(transaction, experiment_id, uuids)


def _ranked(experiment: RowMapping, where: ColumnElement[bool]) -> "Select[tuple[object, ...]]":
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
    transaction: Transaction, experiment: RowMapping, policy: "CheckpointStorageConfig"
) -> list[RowMapping]:
    """Return the checkpoints that are kept as the experiment's best."""
    count = policy.save_experiment_best
    if count == 0:
        return []
    mine = checkpoints.c.experiment_id == experiment["id"]
    query = best_checkpoints(experiment).where(mine).limit(count)
    return list(transaction.connection.execute(query).mappings())


def forget_names(transaction: Transaction, experiment_id: int, gone: Sequence[str]) -> None:
    """Let trials not name checkpoints that are gone; the next best takes the best one's place."""
    experiment = find(transaction, experiments, experiment_id)
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
        transaction.connection.execute(
            update(trials)
            .where(trials.c.experiment_id == experiment_id, column.in_(gone))
            .values({column.name: value})
        )
