"""Which checkpoints are kept: the policy of ``checkpoint_storage``, applied as new ones come.

The latest checkpoint of a trial that has not ended is always kept, validated or not. A row is
marked first and its files go after the commit; what a crash in between leaves is swept up at the
next start.
"""

from functools import partial
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, and_, select, update

from zeroserver.orchestrator.desk import World, find, touch
from zeroserver.states import TRIAL_ENDED
from zeroserver.store.database import Transaction
from zeroserver.store.schema import checkpoints, experiments, metric_keys, points, trials

__all__ = ["apply_retention", "leftovers"]


def leftovers(connection: Connection) -> list[str]:
    """Return the paths of deleted checkpoints, whose files may still be there."""
    deleted = select(checkpoints.c.path).where(checkpoints.c.state == "DELETED")
    return [path for path in connection.scalars(deleted) if Path(path).exists()]


def apply_retention(world: World, transaction: Transaction, trial_id: int) -> None:
    """Delete the checkpoints of a trial that the experiment's policy does not keep."""
    trial = find(transaction, trials, trial_id)
    policy = world.config(transaction, trial["experiment_id"]).checkpoint_storage
    columns = checkpoints.c
    rows = transaction.connection.execute(
        select(columns.id, columns.uuid, columns.path)
        .where(columns.trial_id == trial_id, columns.state == "COMPLETED")
        .order_by(columns.steps_completed.desc(), columns.id.desc())
    ).all()
    kept = {row.uuid for row in rows[: policy.save_trial_latest]}
    if trial["state"] not in TRIAL_ENDED:
        kept |= {row.uuid for row in rows[:1]} | {trial["latest_checkpoint"]}
    mine = columns.trial_id == trial_id
    everyone = columns.experiment_id == trial["experiment_id"]
    kept |= _best(transaction, trial["experiment_id"], mine, policy.save_trial_best)
    kept |= _best(transaction, trial["experiment_id"], everyone, policy.save_experiment_best)
    gone = [row for row in rows if row.uuid not in kept]
    if not gone:
        return
    ids = [row.id for row in gone]
    transaction.connection.execute(
        update(checkpoints).where(columns.id.in_(ids)).values(state="DELETED")
    )
    for row in gone:
        touch(transaction, "checkpoint", trial["experiment_id"], row.uuid)
        transaction.then.append(partial(world.janitor.remove, row.path))
    _forget_names(transaction, trial_id, [row.uuid for row in gone])


def _best(
    transaction: Transaction, experiment_id: int, where: ColumnElement[bool], count: int
) -> set[str]:
    """Return the uuids of the checkpoints with the best metric."""
    if count == 0:
        return set()
    experiment = find(transaction, experiments, experiment_id)
    value = points.c.value.asc() if experiment["smaller_is_better"] else points.c.value.desc()
    key = (
        select(metric_keys.c.id)
        .where(metric_keys.c.group_name == "validation", metric_keys.c.name == experiment["metric"])
        .scalar_subquery()
    )
    same = and_(
        points.c.trial_id == checkpoints.c.trial_id,
        points.c.key_id == key,
        points.c.step == checkpoints.c.steps_completed,
    )
    query = (
        select(checkpoints.c.uuid)
        .select_from(checkpoints)
        .join(points, same)
        .where(where, checkpoints.c.state == "COMPLETED", points.c.value.is_not(None))
        .order_by(value, checkpoints.c.id)
        .limit(count)
    )
    return set(transaction.connection.scalars(query))


def _forget_names(transaction: Transaction, trial_id: int, gone: list[str]) -> None:
    """Let a trial not name checkpoints that are gone."""
    for column in (trials.c.latest_checkpoint, trials.c.best_checkpoint):
        transaction.connection.execute(
            update(trials)
            .where(trials.c.id == trial_id, column.in_(gone))
            .values({column.name: None})
        )
