"""Experiments: submission, user actions and deletion."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, select

from zerolab.contract.secrets import mask_secrets
from zerolab.scheduler import HOST_SLOT
from zeroserver.orchestrator.checkpoints.checkpoint_service import CheckpointService
from zeroserver.orchestrator.checkpoints.model_service import ModelService
from zeroserver.orchestrator.cluster.scheduler_input import OPEN_RUNS
from zeroserver.orchestrator.cluster.slurm import check_pool_holds
from zeroserver.orchestrator.lifecycle import (
    PAUSED_BY_EXPERIMENT,
    LifecycleService,
    stop_reason,
)
from zeroserver.orchestrator.run_service import RunService
from zeroserver.orchestrator.scheduling import SchedulingService
from zeroserver.orchestrator.search.operation_service import OperationService
from zeroserver.orchestrator.search.search_service import (
    NewSearch,
    SearchService,
    check_custom_class,
)
from zeroserver.orchestrator.search.warm_start import WarmStartService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import (
    EXPERIMENT_ACTIONS,
    EXPERIMENT_ENDED,
    EXPERIMENT_STOPPING,
    TRIAL_OPEN,
    ExperimentState,
    TrialState,
)
from zeroserver.store.archives import ArchiveGoneError, has_archive, remove_archive
from zeroserver.store.project_directory import open_project
from zeroserver.store.rows import ExperimentRow, RunRow, TrialRow
from zeroserver.store.schema import checkpoints, comments, experiments, runs, trials

if TYPE_CHECKING:  # imported with the first experiment
    from zerolab.config.experiment.experiment_config import ExperimentConfig

__all__ = ["ExperimentService", "Submission", "resource_columns", "unapplied_experiments"]

_STATE_AFTER = {
    "pause": ExperimentState.PAUSED,
    "activate": ExperimentState.ACTIVE,
    "cancel": ExperimentState.STOPPING_CANCELED,
    "kill": ExperimentState.STOPPING_KILLED,
}
"""State of an experiment after an action that affects its trials."""
_RUNS_AT_ONCE = 64
"""Maximum number of runs that one transaction preempts or stops."""


class Submission(msgspec.Struct, frozen=True):
    """Validated experiment to be created."""

    config: "ExperimentConfig"
    raw_config: Mapping[str, Any]
    archive: str | None
    """SHA-256 of the model directory's archive."""
    seed: int
    owner_id: int
    """User who submits it."""
    activate: bool = True
    test_mode: bool = False
    forked_from: int | None = None
    warnings: Sequence[str] = ()
    """Warnings for the user who submits it."""
    prepared_search: list[NewSearch] = msgspec.field(default_factory=list)
    """Its searcher, prepared in advance; removed when used, because a searcher is mutable."""


_TRIALS_AT_ONCE = 1000
_EVENTS_AT_ONCE = 20_000
_SOME_TRIALS = "SELECT id FROM trials WHERE experiment_id = ? ORDER BY id LIMIT ?"
_REMOVE_EVENTS = (
    "DELETE FROM searcher_events WHERE id IN "
    "(SELECT id FROM searcher_events WHERE experiment_id = ? ORDER BY id LIMIT ?)"
)


class ExperimentService(Service):
    """Creates experiments, carries out user actions on them, and deletes them."""

    operations = Uses(OperationService)
    lifecycle = Uses(LifecycleService)
    runs = Uses(RunService)
    searches = Uses(SearchService)
    scheduling = Uses(SchedulingService)
    checkpoints = Uses(CheckpointService)
    models = Uses(ModelService)
    warm_starts = Uses(WarmStartService)

    def create(self, submission: Submission) -> int:
        """Store an experiment, create its first trials and return its id.

        Raises:
            ArchiveGoneError: If its archive is missing or about to be removed; the caller stores it
                again.
            ConfigError: If its project or its pool cannot run it, or its storage is full.
            ConflictError: If its project is archived.
        """
        archive = submission.archive
        if archive is not None and (
            archive in self.work.orchestrator.deletions.archives
            or not has_archive(self.work.home.archives, archive)
        ):
            msg = f"the archive {archive} was removed with the last experiment that had it"
            raise ArchiveGoneError(msg)
        check_pool_holds(self.work.connection, submission.config)
        check_custom_class(self.work.orchestrator, submission.config, submission.owner_id)
        row = _row(self.work.orchestrator, submission)
        row["project_id"] = open_project(
            self.work.connection, submission.config.project, hidden=self.work.hidden
        )
        self.work.orchestrator.defaults.check_storage(self.work.connection, row["project_id"])
        row["source_checkpoint"] = self.warm_starts.source_of_experiment(submission.config.searcher)
        result = self.work.connection.execute(
            experiments.insert().values(row).returning(experiments.c.id)
        )
        experiment_id = int(result.scalar_one())
        self.work.save(experiments, experiment_id, position=experiment_id)
        self.work.emit("created", experiment_id)
        new_search = (
            submission.prepared_search.pop()
            if submission.prepared_search
            else NewSearch.of(submission.config, submission.seed)
        )
        operations = self.searches.first_operations(experiment_id, new_search)
        self.operations.execute(experiment_id, operations)
        self.lifecycle.settle(experiment_id)
        self.scheduling.schedule()
        return experiment_id

    def move(self, experiment_id: int, project: str) -> None:
        """Move an experiment to another project.

        Raises:
            NotFoundError: If there is no such experiment.
            ConfigError: If there is no such project.
            ConflictError: If the project is archived.
        """
        experiment = self.work.find(ExperimentRow, experiment_id)
        project_id = open_project(self.work.connection, project, hidden=self.work.hidden)
        if project_id != experiment.project_id:
            self.work.save(experiments, experiment_id, project_id=project_id)
            self.work.forget_job(experiment_id)  # projects may have quotas
            self.work.then.append(self.work.orchestrator.users.note_change)
            self.work.touch("experiment", experiment_id, experiment_id)
            self.scheduling.schedule()

    def act(self, experiment_id: int, action: str) -> None:
        """Pause, activate, cancel, kill, archive or unarchive an experiment; idempotent.

        Raises:
            NotFoundError: If there is no such experiment.
            ConflictError: If its state does not allow it.
        """
        experiment = self.work.find(ExperimentRow, experiment_id)
        if EXPERIMENT_ACTIONS[action].wanted("experiment", experiment_id, experiment.state):
            if action in _STATE_AFTER:
                self._apply_new_state(experiment, _STATE_AFTER[action])
            else:
                self.work.save(experiments, experiment_id, archived=int(action == "archive"))
            self.work.touch("experiment", experiment_id, experiment_id)
            self.scheduling.schedule()

    def _apply_new_state(
        self, experiment: ExperimentRow, state: ExperimentState, **values: Any
    ) -> None:
        """Change an experiment's state and start to apply it to its trials."""
        self.lifecycle.move_experiment(experiment, state, **values)
        self.begin_to_apply_state(experiment.id)

    def begin_to_apply_state(self, experiment_id: int) -> None:
        """Start to apply an experiment's new state to its trials.

        If states of other experiments are still being applied, a later transaction does it all.
        """
        self.lifecycle.mark_unapplied(experiment_id, unapplied=True)
        if len(self.work.orchestrator.queue.unapplied) == 1:
            self.apply_state(experiment_id)

    def apply_state(self, experiment_id: int) -> None:
        """Apply an experiment's state to a limited number of its trials.

        Call it again in new transactions while the experiment is in
        ``orchestrator.queue.unapplied``. After a crash the next server finds the remaining trials
        in the database: see :func:`unapplied_experiments`.
        """
        experiment = self.work.find(ExperimentRow, experiment_id)
        if experiment.state not in EXPERIMENT_ENDED and self._move_trials(experiment):
            self.work.touch("experiment", experiment_id, experiment_id)
            return
        self.lifecycle.mark_unapplied(experiment_id, unapplied=False)
        if experiment.state in EXPERIMENT_STOPPING:
            self.lifecycle.settle(experiment_id)

    def _move_trials(self, experiment: ExperimentRow) -> bool:
        """Move some trials to the state that their experiment's state requires.

        Returns:
            Whether more trials may be left for another transaction.
        """
        if self.lifecycle.move_idle(experiment):
            return True
        if experiment.state == ExperimentState.ACTIVE:
            return False
        running = self._unaware(experiment)
        for trial in running[:_RUNS_AT_ONCE]:
            if experiment.state == ExperimentState.PAUSED:
                self.runs.direct(trial.run_id, "preempt")
            else:
                reason = stop_reason(experiment.state)
                self.operations.stop_trial(self.work.find(TrialRow, trial.id), reason)
        return len(running) > _RUNS_AT_ONCE

    def _unaware(self, experiment: ExperimentRow) -> list[Any]:
        """Return the trials whose runs were not yet asked to stop for their experiment."""
        canceled = experiment.state == ExperimentState.STOPPING_CANCELED
        which: ColumnElement[bool] = runs.c.directive == "train"
        if canceled:
            which = trials.c.stop.is_(None) | (trials.c.stop == "searcher") & (runs.c.killed == 0)
        elif experiment.state in EXPERIMENT_STOPPING:
            which = trials.c.stop.is_(None) | (runs.c.killed == 0)
        with_run = trials.c.state.in_(TRIAL_OPEN - {TrialState.PAUSED})
        query = (
            select(trials.c.id, trials.c.run_id, trials.c.stop)
            .join(runs, runs.c.id == trials.c.run_id)
            .where(trials.c.experiment_id == experiment.id, with_run, which)
        )
        return [
            row
            for row in self.work.connection.execute(query)
            if row.stop is None
            or not canceled
            or self.runs.never_asks(self.work.find(RunRow, row.run_id))
        ]

    def remove(self, experiment_id: int) -> bool:
        """Delete an ended experiment with its rows and files, and its archive if unused.

        One call deletes only as much as fits into a transaction: call it again until it returns
        True. Checkpoints are deleted first, then trials, so an interrupted deletion leaves an
        experiment without some of them.

        Returns:
            Whether all of it is deleted.

        Raises:
            NotFoundError: If there is no such experiment.
            ConflictError: If it has not ended, another experiment starts from one of its
                checkpoints, or one of them is registered.
        """
        experiment = self.work.find(ExperimentRow, experiment_id)
        EXPERIMENT_ACTIONS["delete"].wanted("experiment", experiment_id, experiment.state)
        self.work.touch("experiment", experiment_id, experiment_id)
        if not self._remove_part(experiment):
            if not experiment.deleting:
                self.work.save(experiments, experiment_id, deleting=1)
            return False
        self.work.orchestrator.queue.drop([experiment_id])
        self.release_archive(experiment.archive)
        return True

    def _remove_part(self, experiment: ExperimentRow) -> bool:
        """Delete some checkpoints, trials or events of an experiment, and finally its row.

        Returns:
            Whether all of it is deleted.
        """
        experiment_id = experiment.id
        of_experiment = checkpoints.c.experiment_id == experiment_id
        self.warm_starts.refuse_while_needed(f"experiment {experiment_id}", of_experiment)
        self.models.refuse_while_registered(f"experiment {experiment_id}", of_experiment)
        if self.checkpoints.delete_some(experiment_id, of_experiment):
            return False
        ids = self.work.raw(_SOME_TRIALS, (experiment_id, _TRIALS_AT_ONCE))
        self.lifecycle.remove_trials(experiment_id, [trial_id for (trial_id,) in ids])
        if len(ids) == _TRIALS_AT_ONCE:
            self.lifecycle.count_trials(experiment)
            return False
        if self.work.run(_REMOVE_EVENTS, (experiment_id, _EVENTS_AT_ONCE)) == _EVENTS_AT_ONCE:
            self.lifecycle.count_trials(experiment)
            return False
        of_it = comments.c.experiment_id == experiment_id
        self.work.connection.execute(delete(comments).where(of_it))
        self.work.connection.execute(delete(experiments).where(experiments.c.id == experiment_id))
        return True

    def release_archive(self, archive: str | None) -> None:
        """Remove an archive after the commit if no experiment uses it.

        Until then, :meth:`create` rejects submissions that use it.
        """
        users = select(experiments.c.id).where(experiments.c.archive == archive).limit(1)
        if archive is None or self.work.connection.scalar(users) is not None:
            return

        def remove_file() -> None:
            self.work.orchestrator.deletions.archives.discard(archive)
            remove_archive(self.work.home.archives, archive)

        self.work.orchestrator.deletions.archives.add(archive)
        self.work.undo.append(lambda: self.work.orchestrator.deletions.archives.discard(archive))
        self.work.then.append(remove_file)

    def fail(self, experiment_id: int, error: str) -> None:
        """Fail an experiment and stop its trials; no effect if it has ended or is stopping.

        Args:
            experiment_id: The experiment.
            error: One line for the user.
        """
        experiment = self.work.find(ExperimentRow, experiment_id)
        if experiment.state in EXPERIMENT_ENDED | EXPERIMENT_STOPPING:
            return
        self._apply_new_state(experiment, ExperimentState.STOPPING_ERROR, error=error)


def unapplied_experiments(connection: Connection) -> list[int]:
    """Return the experiments whose state a killed server did not apply to all their trials."""
    idle = select(trials.c.id).where(
        trials.c.experiment_id == experiments.c.id, trials.c.run_id.is_(None)
    )
    running = select(runs.c.id).where(
        runs.c.experiment_id == experiments.c.id,
        runs.c.state.in_(OPEN_RUNS),
        runs.c.directive == "train",
    )
    state = experiments.c.state
    query = select(experiments.c.id).where(
        state.in_(EXPERIMENT_STOPPING)
        | (state == ExperimentState.PAUSED)
        & (idle.where(trials.c.state == TrialState.QUEUED).exists() | running.exists())
        | (state == ExperimentState.ACTIVE) & idle.where(PAUSED_BY_EXPERIMENT).exists()
    )
    return list(connection.scalars(query.order_by(experiments.c.id)))


def resource_columns(config: "ExperimentConfig") -> dict[str, Any]:
    """Return the columns of an experiment that the scheduler reads."""
    from zerolab.config.experiment.resources import fewer_slots  # pydantic

    resources, searcher = config.resources, config.searcher
    fewer = [] if resources.hosts else fewer_slots(resources)
    return {
        # The slots of a hostfile are counted in host_slots; on the agent the launcher takes one
        # slot.
        "slots": 1 if resources.hosts else resources.slots_per_trial,
        "host_slots": msgspec.json.encode(_host_slots(resources.hosts or {})).decode(),
        "priority": resources.priority,
        "weight": resources.weight,
        "max_slots": resources.max_slots,
        "max_nodes": resources.max_nodes,
        "slots_per_rank": resources.slots_per_rank,
        "fewer_slots": msgspec.json.encode(fewer).decode(),
        "pool": resources.resource_pool,
        "queue_time": resources.queue_time,
        "log_retention_days": config.retention_policy.days,
        "metric_retention_days": config.retention_policy.metric_retention_days,
        "concurrent_trials": 0 if searcher.has_one_trial else searcher.max_concurrent_trials,
    }


def _host_slots(hosts: Mapping[str, Sequence[int]]) -> list[str]:
    return [f"{HOST_SLOT}{host}:{slot}" for host, slots in hosts.items() for slot in slots]


def _row(orchestrator: Orchestrator, submission: Submission) -> dict[str, Any]:
    config = submission.config
    resolved = config.to_dict()
    resolved["reproducibility"]["experiment_seed"] = submission.seed
    return {
        "name": config.name,
        "description": config.description or "",
        "labels": _json(config.labels),
        "state": ExperimentState.ACTIVE if submission.activate else ExperimentState.PAUSED,
        "config": _json(mask_secrets(resolved)),
        "raw_config": _json(submission.raw_config),
        "archive": submission.archive,
        "test_mode": int(submission.test_mode),
        "forked_from": submission.forked_from,
        "searcher_name": config.searcher.name,
        "metric": config.searcher.metric or "",
        "smaller_is_better": int(config.searcher.smaller_is_better),
        "seed": submission.seed,
        "owner_id": submission.owner_id,
        **resource_columns(config),
        "created_at": orchestrator.clock(),
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
