"""Retention of checkpoints: the policy of ``checkpoint_storage``, applied after each report.

A checkpoint is kept as one of the latest or best of its trial, as one of the best of its
experiment, or as a version of a model. The latest checkpoint of a trial that has not ended is
always kept, even without a validation.

A report usually affects only the checkpoints of its own trial. If one of them becomes one of the
best of the experiment, the policy is applied to all trials, since it may displace a checkpoint of
any of them.

Files are deleted after the commit (:mod:`zeroserver.store.janitor`).
"""

import uuid
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, func, select, update

from zerolab.contract.messages import CheckpointRecord
from zerolab.contract.names import resources_problem
from zerolab.errors import ConfigError
from zeroserver.orchestrator.checkpoints.best import best_checkpoints, searcher_metric_at
from zeroserver.orchestrator.checkpoints.model_service import registered
from zeroserver.orchestrator.search.warm_start import needed_for_warm_start
from zeroserver.orchestrator.service import Service
from zeroserver.orchestrator.state import config_of, owner_of
from zeroserver.states import TRIAL_ENDED
from zeroserver.store.janitor import Chore
from zeroserver.store.points import MAX_STEP
from zeroserver.store.rows import ExperimentRow, Reporting, TrialRow, find_row
from zeroserver.store.schema import checkpoints, experiments, points, trials

if TYPE_CHECKING:  # imported with the first experiment
    from zerolab.config.experiment.storage import CheckpointStorageConfig

__all__ = [
    "AT_ONCE",
    "CheckpointService",
    "check_checkpoint",
    "due_experiments",
    "not_kept",
    "trials_to_thin",
]

AT_ONCE = 1000
"""Maximum number of checkpoints that one transaction deletes."""
_MANY = "SELECT 1 FROM checkpoints WHERE experiment_id = ? AND state = 'COMPLETED' LIMIT 1 OFFSET ?"


class CheckpointService(Service):
    """Stores checkpoints and applies the retention policy."""

    def apply_to_trial(self, trial_id: int) -> None:
        """Apply the retention policy to the checkpoints of a trial."""
        trial = self.work.find(TrialRow, trial_id)
        self._apply(trial.experiment_id, checkpoints.c.trial_id == trial_id)

    def apply_to_experiment(self, experiment_id: int) -> None:
        """Apply the retention policy to all checkpoints of an experiment.

        If there are many, later transactions do it: see :meth:`mark_due`.
        """
        if self.work.raw(_MANY, (experiment_id, AT_ONCE)):
            self.mark_due(experiment_id)
        else:
            self._apply(experiment_id, checkpoints.c.experiment_id == experiment_id)

    def mark_due(self, experiment_id: int) -> None:
        """Schedule applying the policy to all checkpoints of an experiment.

        The mark is stored, so that the next server continues after a crash.
        """
        if experiment_id in self.work.orchestrator.deletions.retention_due:
            return
        self.work.save(experiments, experiment_id, retention_due=1)
        self.work.orchestrator.deletions.retention_due.add(experiment_id)
        self.work.undo.append(
            lambda: self.work.orchestrator.deletions.retention_due.discard(experiment_id)
        )

    def settle_due(self, experiment_id: int) -> None:
        """Mark the policy as applied, unless it is due again."""
        if experiment_id not in self.work.orchestrator.deletions.retention_due:
            self.work.save(experiments, experiment_id, retention_due=0)

    def thin_out(self, experiment_id: int, trial_ids: Sequence[int]) -> list[str]:
        """Prune up to AT_ONCE checkpoints of some trials under the retention policy.

        Returns:
            The uuids of the deleted checkpoints.
        """
        experiment = self.work.find(ExperimentRow, experiment_id)
        policy = self.work.config(experiment_id).checkpoint_storage
        of_trials = checkpoints.c.trial_id.in_(trial_ids)
        deleted = not_kept(self.work.connection, experiment, policy, of_trials)
        uuids = [row.uuid for row in deleted[:AT_ONCE]]
        self.delete(experiment_id, uuids)
        return uuids

    def apply_after_report(self, trial_id: int, steps: int) -> None:
        """Apply the policy after a checkpoint or validation at ``steps`` was reported."""
        trial = self.work.find(TrialRow, trial_id)
        experiment = self.work.experiment_of(trial)
        policy = self.work.config(experiment.id).checkpoint_storage
        best = _best(self.work.connection, experiment, policy)
        if any((row.trial_id, row.steps_completed) == (trial_id, steps) for row in best):
            self.apply_to_experiment(experiment.id)
        else:
            self._apply(experiment.id, checkpoints.c.trial_id == trial_id)

    def discard_unfinished(self, trial: TrialRow) -> None:
        """Delete unfinished checkpoints of a trial that will not run again."""
        storage = self.work.storage_of(trial.experiment_id)
        chore = Chore(storage=storage, owner=owner_of(self.work.orchestrator, trial.id))
        self.work.orchestrator.janitor.discard(self.work, chore)

    def _apply(self, experiment_id: int, condition: ColumnElement[bool]) -> None:
        experiment = self.work.find(ExperimentRow, experiment_id)
        policy = self.work.config(experiment_id).checkpoint_storage
        deleted = not_kept(self.work.connection, experiment, policy, condition)
        self.delete(experiment_id, [row.uuid for row in deleted])

    def delete_some(self, experiment_id: int, condition: ColumnElement[bool]) -> bool:
        """Delete up to AT_ONCE selected checkpoints; return whether more may be left."""
        query = select(checkpoints.c.uuid).where(condition, checkpoints.c.state != "DELETED")
        uuids = self.work.connection.scalars(query.limit(AT_ONCE)).all()
        self.delete(experiment_id, uuids)  # empty for an imported experiment, which has no storage
        return len(uuids) == AT_ONCE

    def delete(self, experiment_id: int, uuids: Sequence[str]) -> None:
        """Delete checkpoints of an experiment; their files are deleted after the commit."""
        if not uuids:
            return
        self.work.connection.execute(
            update(checkpoints).where(checkpoints.c.uuid.in_(uuids)).values(state="DELETED")
        )
        storage = self.work.storage_of(experiment_id)
        for name in uuids:
            self.work.touch("checkpoint", experiment_id, name)
        chores = (Chore(storage=storage, name=name) for name in uuids)
        self.work.orchestrator.janitor.discard(self.work, *chores)
        self.forget_deleted(experiment_id, uuids)

    def forget_deleted(self, experiment_id: int, deleted: Sequence[str]) -> None:
        """Replace trials' references to deleted checkpoints; the next best becomes the best."""
        experiment = self.work.find(ExperimentRow, experiment_id)
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
            (trials.c.best_checkpoint, next_best if experiment.metric else None),
        ):
            self.work.connection.execute(
                update(trials)
                .where(trials.c.experiment_id == experiment_id, column.in_(deleted))
                .values({column.name: value})
            )

    def add(self, run: Reporting, record: CheckpointRecord) -> bool:
        """Store a checkpoint; return whether it is new.

        Raises:
            ConfigError: If the checkpoint belongs to another trial.
        """
        query = select(checkpoints.c.trial_id).where(checkpoints.c.uuid == record.uuid)
        owner = self.work.connection.scalar(query)
        if owner is not None and owner != run.trial_id:
            problem = f"uuid: {record.uuid} is another trial's; report each under a new uuid"
            raise ConfigError("checkpoint", [problem])
        if owner is not None:
            return False
        address = self.work.storage_of(run.experiment_id)
        row = {
            "uuid": record.uuid,
            "trial_id": run.trial_id,
            "experiment_id": run.experiment_id,
            "run_id": run.id,
            "steps_completed": record.steps_completed,
            "state": "COMPLETED",
            "size_bytes": sum(record.resources.values()),
            "resources": msgspec.json.encode(record.resources).decode(),
            "metadata": msgspec.json.encode(record.metadata).decode(),
            "path": address.at(record.uuid),
            "created_at": record.time,
        }
        self.work.connection.execute(checkpoints.insert().values(row))
        self.work.save(trials, run.trial_id, latest_checkpoint=record.uuid)
        self.work.touch("checkpoint", run.experiment_id, record.uuid)
        return True

    def choose_best(self, experiment: ExperimentRow, trial_id: int) -> None:
        """Update the best checkpoint of a trial."""
        if not experiment.metric:
            return
        of_trial = checkpoints.c.trial_id == trial_id
        row = self.work.connection.execute(
            best_checkpoints(experiment).where(of_trial).limit(1)
        ).first()
        if row is not None:
            self.work.save(trials, trial_id, best_checkpoint=row.uuid)


def due_experiments(connection: Connection) -> list[int]:
    """Return the experiments whose retention policy must still be applied."""
    query = select(experiments.c.id).where(experiments.c.retention_due == 1)
    return list(connection.scalars(query.order_by(experiments.c.id)))


def trials_to_thin(connection: Connection, experiment_id: int) -> list[list[int]]:
    """Return the trials with checkpoints to prune, in groups for one transaction each."""
    experiment = find_row(connection, ExperimentRow, experiment_id)
    policy = config_of(experiment).checkpoint_storage
    of_experiment = checkpoints.c.experiment_id == experiment_id
    parts: list[list[int]] = []
    size = AT_ONCE
    for trial_id, count in Counter(
        row.trial_id for row in not_kept(connection, experiment, policy, of_experiment)
    ).items():
        if size + count > AT_ONCE:
            parts.append([])
            size = 0
        parts[-1].append(trial_id)
        size += count
    return parts


def not_kept(
    connection: Connection,
    experiment: ExperimentRow,
    policy: "CheckpointStorageConfig",
    where: ColumnElement[bool],
) -> list[Row[Any]]:
    """Return the checkpoints that a policy does not keep and nothing else needs.

    Args:
        connection: Connection for reading.
        experiment: Experiment of the checkpoints.
        policy: Retention policy to apply.
        where: Condition on the checkpoints; must select all or none of each trial.
    """
    protected = {row.uuid for row in _best(connection, experiment, policy)}
    deleted = []
    for row in connection.execute(_ranked(experiment, where)):
        running = row.trial_state not in TRIAL_ENDED
        if (
            row.uuid not in protected
            and row.age > policy.save_trial_latest
            and (row.value is None or row.rank > policy.save_trial_best)
            and not (running and (row.age == 1 or row.uuid == row.latest_checkpoint))
        ):
            deleted.append(row)
    if deleted:
        needed = set(connection.scalars(needed_for_warm_start()))
        needed.update(connection.scalars(registered()))
        deleted = [row for row in deleted if row.uuid not in needed]
    return deleted


def _ranked(experiment: ExperimentRow, condition: ColumnElement[bool]) -> "Select[Any]":
    """Select checkpoints with their rank in their trials.

    ``age`` 1 is the latest, ``rank`` 1 the best. ``rank`` is valid only for checkpoints with a
    value.
    """
    columns = checkpoints.c
    value = points.c.value.asc() if experiment.smaller_is_better else points.c.value.desc()
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
        .where(condition, columns.state == "COMPLETED")
        .order_by(columns.id)
    )


def _best(
    connection: Connection, experiment: ExperimentRow, policy: "CheckpointStorageConfig"
) -> list[Row[Any]]:
    """Return the checkpoints that are kept as the experiment's best."""
    count = policy.save_experiment_best
    if count == 0:
        return []
    of_experiment = checkpoints.c.experiment_id == experiment.id
    query = best_checkpoints(experiment).where(of_experiment).limit(count)
    return list(connection.execute(query))


def check_checkpoint(record: CheckpointRecord) -> None:
    """Validate a reported checkpoint.

    Raises:
        ConfigError: If its uuid is invalid, its steps are not 0 to 2^53, or a file has an invalid
            name or size.
    """
    try:
        canonical = str(uuid.UUID(record.uuid)) == record.uuid
    except ValueError:
        canonical = False
    if not canonical or not 0 <= record.steps_completed < MAX_STEP:
        got = f"{record.uuid[:50]!r} and {record.steps_completed}"
        problem = f"uuid, steps_completed: must be a lower-case uuid and at least 0, got {got}"
        raise ConfigError("checkpoint", [problem])
    if wrong := resources_problem(record.resources):
        raise ConfigError("checkpoint", [f"resources: {wrong}"])
