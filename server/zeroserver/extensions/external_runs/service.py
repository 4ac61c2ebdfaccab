"""Experiments whose only trial runs outside of the scheduler."""

import gzip
import io
import tarfile
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import select

from zerolab.contract.messages import RunExit
from zerolab.contract.secrets import mask_secrets
from zerolab.contract.spec import EXIT_USER_ERROR, RunSpec
from zerolab.errors import ConflictError, StaleRunError
from zeroserver.orchestrator.exit_service import ExitService
from zeroserver.orchestrator.experiment_service import ExperimentService, Submission
from zeroserver.orchestrator.lifecycle import LifecycleService
from zeroserver.orchestrator.run_service import RunService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.orchestrator.state import owner_of
from zeroserver.states import EXPERIMENT_ENDED, TRIAL_ENDED, ExperimentState, RunState, TrialState
from zeroserver.store.rows import ExperimentRow, RunRow, TrialRow, read_row, read_rows
from zeroserver.store.schema import experiments, runs, trials

__all__ = [
    "ExternalRunService",
    "OpenedRun",
    "archive_content",
    "check_external",
    "open_external_runs",
    "raw_config",
]

_MARK = "external_run"
"""Key of the experiment's ``data`` block that holds the id of the run."""

_SCRIPT = """import sys

sys.stderr.write(
    "This experiment was reported by a program that Zerolab did not start, so it has no code here. "
    "Start the program again with the same id to continue it.\\n"
)
sys.exit(64)
"""
"""Entrypoint of the experiments, in case somebody continues or forks one."""


class OpenedRun(msgspec.Struct, frozen=True):
    """Run that accepts reports."""

    experiment_id: int
    trial_id: int
    run_id: int
    steps_completed: int


def archive_content() -> bytes:
    """Return the model archive of all these experiments; the same bytes at each call."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        member = tarfile.TarInfo("external_run.py")
        member.size = len(_SCRIPT)
        archive.addfile(member, io.BytesIO(_SCRIPT.encode()))
    return gzip.compress(plain.getvalue(), mtime=0)


def raw_config(
    key: str, name: str, description: str, labels: list[str], project: str = ""
) -> dict[str, Any]:
    """Return the experiment file of an external run."""
    return {
        **({"project": project} if project else {}),
        "name": name,
        "description": description,
        "labels": labels,
        "entrypoint": "python external_run.py",
        "max_restarts": 0,
        "data": {_MARK: key},
        "searcher": {"name": "single"},
    }


class ExternalRunService(Service):
    """Creates, resumes and ends runs that have no agent."""

    experiments = Uses(ExperimentService)
    lifecycle = Uses(LifecycleService)
    runs = Uses(RunService)
    exits = Uses(ExitService)

    def open(
        self,
        submission: Submission,
        key: str,
        session: str,
        *,
        replace: bool,
        create_project: bool = False,
    ) -> OpenedRun:
        """Open the run of a session; create the experiment if the id is new.

        A session that has ended is reopened, and keeps the number of its stored records. Another
        session of the same id continues the trial with a new run.

        Args:
            submission: Experiment to create.
            key: Id of the run, unique for its owner.
            session: Id of the process that reports.
            replace: Whether to take over from a session that is still open.
            create_project: Whether to create the project of a new experiment if it is missing.

        Raises:
            ConfigError: If there is no such project.
            ConflictError: If another session is open, the project is archived, or the experiment
                is being deleted.
            StaleRunError: If the experiment was canceled during the session, or another session
                has taken over.
        """
        experiment = self._find(key, submission.owner_id)
        if experiment is None:
            if create_project and (project := submission.config.project) is not None:
                from zeroserver.extensions.projects.service import ProjectService

                ProjectService(self.work).ensure(project, submission.owner_id)
            experiment = self._create(submission, key)
        elif experiment.project_id in self.work.hidden:
            msg = f"run {key}: its project is restricted to members; use another id"
            raise ConflictError(msg)
        trial = self._trial_of(experiment.id)
        run = self._run_of(trial.id, session)
        if run is not None and run.state != RunState.EXITED and trial.run_id == run.id:
            return OpenedRun(experiment.id, trial.id, run.id, trial.steps_completed)
        if run is not None and trial.state == TrialState.CANCELED:
            raise StaleRunError(f"experiment {experiment.id} was canceled")
        if experiment.deleting:
            raise ConflictError(f"experiment {experiment.id} is being deleted; use another id")
        self._close_other(experiment, trial, replace=replace)
        self._reopen(experiment.id, trial.id)
        run_id = self._add_run(experiment.id, trial.id, session) if run is None else run.id
        if run is not None:
            self.work.save(
                runs, run.id, state=RunState.RUNNING, directive="train", killed=0, deadline_at=None,
                ended_at=None, exit_code=None, reason=None,
            )  # fmt: skip
        now = self.work.clock()
        started_at = trial.started_at or now
        self.work.save(trials, trial.id, run_id=run_id, restart_at=None, started_at=started_at)
        self.lifecycle.move_trial(self.work.find(TrialRow, trial.id), TrialState.RUNNING)
        self.work.save(experiments, experiment.id, started_at=experiment.started_at or now)
        return OpenedRun(experiment.id, trial.id, run_id, trial.steps_completed)

    def end(self, run_id: int, error: str | None) -> None:
        """End a run and its trial; idempotent.

        Args:
            run_id: The run.
            error: Why it failed; None if it completed.

        Raises:
            NotFoundError: If there is no such run.
            ConflictError: If an agent runs it.
        """
        run = self.work.find(RunRow, run_id)
        check_external(run)
        if run.state == RunState.EXITED:
            return
        self.work.save(runs, run_id, killed=0)  # a killed run would be queued for an agent
        code = 0 if error is None else EXIT_USER_ERROR
        self.exits.end_run(run_id, RunExit(code, error))

    def set_hparams(self, run_id: int, hparams: Mapping[str, Any]) -> None:
        """Replace the hyperparameters of a run's trial.

        Raises:
            NotFoundError: If there is no such run.
            StaleRunError: If it has ended, or another run has taken over.
            ConflictError: If an agent runs it.
        """
        run, trial = self.runs.current(run_id)
        check_external(run)
        masked = mask_secrets({"data": dict(hparams)})["data"]  # by the names of its keys
        text = msgspec.json.encode(masked).decode()
        self.work.save(trials, trial.id, hparams=text)
        self.work.touch("trial", trial.experiment_id, trial.id)

    def _find(self, key: str, owner_id: int) -> ExperimentRow | None:
        columns = experiments.c
        query = (
            select(experiments)
            .where(columns.external_id == key, columns.owner_id == owner_id)
            .order_by(columns.id.desc())
            .limit(1)
        )
        return read_row(self.work.connection, ExperimentRow, query)

    def _create(self, submission: Submission, key: str) -> ExperimentRow:
        experiment_id = self.experiments.create(submission)  # paused, so that no agent gets it
        self.work.save(experiments, experiment_id, external_id=key)
        experiment = self.work.find(ExperimentRow, experiment_id)
        self.lifecycle.move_experiment(experiment, ExperimentState.ACTIVE)
        self._queue(self._trial_of(experiment_id))
        return self.work.find(ExperimentRow, experiment_id)

    def _close_other(self, experiment: ExperimentRow, trial: TrialRow, *, replace: bool) -> None:
        """End the run of another session.

        Raises:
            ConflictError: If it must not be replaced.
        """
        if trial.run_id is None:
            return
        if not replace:
            problem = f"experiment {experiment.id} is reported by another process now"
            raise ConflictError(f"{problem}; wait until it has ended, or use another id")
        reason = "another process with the same id has taken over"
        self.end(trial.run_id, reason)

    def _reopen(self, experiment_id: int, trial_id: int) -> None:
        """Make an ended experiment active and queue its trial, which gets a run at once."""
        experiment = self.work.find(ExperimentRow, experiment_id)
        trial = self.work.find(TrialRow, trial_id)
        if experiment.state in EXPERIMENT_ENDED:
            self.lifecycle.move_experiment(
                experiment, ExperimentState.ACTIVE,
                ended_at=None, error=None, archived=0, searcher_done=1,
            )  # fmt: skip
        if trial.state in TRIAL_ENDED:
            self.lifecycle.reopen(trial, ExperimentState.ACTIVE, waits=0, until=None)
        else:
            self._queue(trial)

    def _queue(self, trial: TrialRow) -> None:
        if trial.state == TrialState.PAUSED:
            self.lifecycle.move_trial(trial, TrialState.QUEUED)

    def _add_run(self, experiment_id: int, trial_id: int, session: str) -> int:
        spec = RunSpec(
            experiment_id=experiment_id,
            trial_id=trial_id,
            run_id=0,
            config={"session": session},
            hparams={},
            trial_seed=0,
            slots=0,
            model_dir="",
            run_dir="",
            checkpoint_dir=self.work.storage_of(experiment_id).root,
            storage_owner=owner_of(self.work.orchestrator, trial_id),
        )
        now = self.work.clock()
        row = {
            "trial_id": trial_id,
            "experiment_id": experiment_id,
            "agent_id": None,
            "slot_ids": "[]",
            "state": RunState.RUNNING,
            "spec": msgspec.json.encode(spec).decode(),
            "created_at": now,
            "started_at": now,
        }
        insert = runs.insert().values(row).returning(runs.c.id)
        return int(self.work.connection.execute(insert).scalar_one())

    def _run_of(self, trial_id: int, session: str) -> RunRow | None:
        query = select(runs).where(runs.c.trial_id == trial_id, runs.c.agent_id.is_(None))
        for run in read_rows(self.work.connection, RunRow, query):
            if msgspec.json.decode(run.spec, type=RunSpec).config.get("session") == session:
                return run
        return None

    def _trial_of(self, experiment_id: int) -> TrialRow:
        query = select(trials).where(trials.c.experiment_id == experiment_id)
        return read_rows(self.work.connection, TrialRow, query.limit(1))[0]


def check_external(run: RunRow) -> None:
    """Check that no agent runs it: the token of a trial opens the routes of external runs, too.

    Raises:
        ConflictError: If an agent runs it.
    """
    if run.agent_id is not None or run.slot_ids != "[]":
        raise ConflictError(f"run {run.id} is managed by the scheduler; it is no external run")


def open_external_runs(connection: Any) -> list[tuple[int, int, int, int]]:
    """Return id, stored records, stored log lines and the kill flag of the open external runs."""
    columns = runs.c
    query = select(columns.id, columns.last_seq, columns.next_log, columns.killed).where(
        columns.state == RunState.RUNNING, columns.agent_id.is_(None), columns.slot_ids == "[]"
    )
    return [(row[0], row[1], row[2], row[3]) for row in connection.execute(query)]
