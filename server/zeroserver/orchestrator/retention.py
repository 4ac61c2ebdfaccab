"""Which checkpoints are kept: the policy of ``checkpoint_storage``, applied as new ones come.

A checkpoint is kept as one of the latest or the best of its trial, or as one of the best of its
experiment; and the latest checkpoint of a trial that has not ended is always kept, validated or
not. What a trial reports moves its own checkpoints alone, unless one of them enters the best of
the experiment: then one of any other trial, ended or not, may have lost its place.

The files go after the commit (:mod:`zeroserver.store.janitor`).
"""

from sqlalchemy import (
    ColumnElement,
    RowMapping,
    ScalarSelect,
    Select,
    and_,
    func,
    select,
    update,
)

from zeroserver.orchestrator.desk import World, find, touch
from zeroserver.states import TRIAL_ENDED
from zeroserver.store.database import Transaction
from zeroserver.store.schema import checkpoints, experiments, metric_keys, points, trials

__all__ = ["apply_after_report", "apply_to_experiment", "apply_to_trial"]


def apply_to_trial(world: World, transaction: Transaction, trial_id: int) -> None:
    """Delete the checkpoints of a trial that the experiment's policy does not keep."""
    trial = find(transaction, trials, trial_id)
    experiment = find(transaction, experiments, trial["experiment_id"])
    best = _best(world, transaction, experiment)
    _apply(world, transaction, experiment, checkpoints.c.trial_id == trial_id, best)


def apply_to_experiment(world: World, transaction: Transaction, experiment_id: int) -> None:
    """Delete the checkpoints of all trials that the experiment's policy does not keep."""
    experiment = find(transaction, experiments, experiment_id)
    best = _best(world, transaction, experiment)
    _apply(world, transaction, experiment, checkpoints.c.experiment_id == experiment_id, best)


def apply_after_report(world: World, transaction: Transaction, trial_id: int, steps: int) -> None:
    """Apply the policy as far as a checkpoint, or a validation, at ``steps`` changes anything."""
    trial = find(transaction, trials, trial_id)
    experiment = find(transaction, experiments, trial["experiment_id"])
    best = _best(world, transaction, experiment)
    entered = any((row["trial_id"], row["steps_completed"]) == (trial_id, steps) for row in best)
    everyone = checkpoints.c.experiment_id == experiment["id"]
    mine = checkpoints.c.trial_id == trial_id
    _apply(world, transaction, experiment, everyone if entered else mine, best)


def _apply(
    world: World,
    transaction: Transaction,
    experiment: RowMapping,
    where: ColumnElement[bool],
    best: list[RowMapping],
) -> None:
    """Delete what is not kept.

    Args:
        world: Of the orchestrator.
        transaction: Of the writer.
        experiment: Whose policy it is.
        where: Which checkpoints are looked at; of a trial all or none.
        best: Those of the experiment that are kept as its best.
    """
    policy = world.config(transaction, experiment["id"]).checkpoint_storage
    kept = {row["uuid"] for row in best}
    gone = []
    for row in transaction.connection.execute(_ranked(experiment, where)):
        running = row.trial_state not in TRIAL_ENDED
        if (
            row.uuid not in kept
            and row.age > policy.save_trial_latest
            and (row.value is None or row.rank > policy.save_trial_best)
            and not (running and (row.age == 1 or row.uuid == row.latest_checkpoint))
        ):
            gone.append(row)
    if not gone:
        return
    transaction.connection.execute(
        update(checkpoints)
        .where(checkpoints.c.id.in_([row.id for row in gone]))
        .values(state="DELETED")
    )
    for row in gone:
        touch(transaction, "checkpoint", experiment["id"], row.uuid)
        world.janitor.discard(transaction, row.path)
    _forget_names(transaction, experiment["id"], [row.uuid for row in gone])


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
            columns.path,
            trials.c.state.label("trial_state"),
            trials.c.latest_checkpoint,
            points.c.value,
            age.label("age"),
            rank.label("rank"),
        )
        .select_from(checkpoints)
        .join(trials, trials.c.id == columns.trial_id)
        .outerjoin(points, _of_the_searcher(experiment))
        .where(where, columns.state == "COMPLETED")
        .order_by(columns.id)
    )


def _best(world: World, transaction: Transaction, experiment: RowMapping) -> list[RowMapping]:
    """Return the checkpoints that are kept as the experiment's best."""
    count = world.config(transaction, experiment["id"]).checkpoint_storage.save_experiment_best
    if count == 0:
        return []
    value = points.c.value.asc() if experiment["smaller_is_better"] else points.c.value.desc()
    query = (
        select(checkpoints.c.uuid, checkpoints.c.trial_id, checkpoints.c.steps_completed)
        .select_from(checkpoints)
        .join(points, _of_the_searcher(experiment))
        .where(
            checkpoints.c.experiment_id == experiment["id"],
            checkpoints.c.state == "COMPLETED",
            points.c.value.is_not(None),
        )
        .order_by(value, checkpoints.c.id)
        .limit(count)
    )
    return list(transaction.connection.execute(query).mappings())


def _of_the_searcher(experiment: RowMapping) -> ColumnElement[bool]:
    """What joins a checkpoint to the searcher's metric at its step."""
    return and_(
        points.c.trial_id == checkpoints.c.trial_id,
        points.c.key_id == _key(experiment["metric"]),
        points.c.step == checkpoints.c.steps_completed,
    )


def _key(metric: str) -> "ScalarSelect[int]":
    return (
        select(metric_keys.c.id)
        .where(metric_keys.c.group_name == "validation", metric_keys.c.name == metric)
        .scalar_subquery()
    )


def _forget_names(transaction: Transaction, experiment_id: int, gone: list[str]) -> None:
    """Let trials not name checkpoints that are gone."""
    for column in (trials.c.latest_checkpoint, trials.c.best_checkpoint):
        transaction.connection.execute(
            update(trials)
            .where(trials.c.experiment_id == experiment_id, column.in_(gone))
            .values({column.name: None})
        )
