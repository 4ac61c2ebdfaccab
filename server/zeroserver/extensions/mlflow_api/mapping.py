"""Mapping of MLflow's runs to external runs: one run is an experiment with one trial.

The name of the MLflow experiment and the tags become labels. Parameters become hyperparameters,
numbers as numbers. A metric keeps its steps and times, with two differences:

- The last value of a step replaces earlier ones.
- Clients send step 0 if a script names none. A further value at step 0 gets the next step.
"""

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import select, update

from zerolab.contract.limits import LABEL_CHARACTERS, LABELS
from zerolab.contract.messages import MetricsRecord, Record, ReportBatch
from zerolab.contract.names import printable, project_name, text_problem
from zerolab.contract.secrets import mask_secrets
from zerolab.errors import ConfigError, ConflictError, NotFoundError, StaleRunError
from zeroserver.extensions.external_runs.service import ExternalRunService
from zeroserver.extensions.mlflow_api.tables import mlflow_experiments, mlflow_runs
from zeroserver.orchestrator.ingest.metric_names import MetricNameService
from zeroserver.orchestrator.ingest.report_service import ReportService
from zeroserver.orchestrator.ingest.values import PointReader, check_times
from zeroserver.orchestrator.search.operation_service import OperationService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import RunState, TrialState
from zeroserver.store.database import raw_rows
from zeroserver.store.points import SHIFTS, store_points
from zeroserver.store.rows import ExperimentRow, RunRow, TrialRow
from zeroserver.store.schema import experiments, trials
from zeroserver.visibility import HIDDEN

__all__ = [
    "Metric",
    "MlflowRun",
    "MlflowService",
    "find_run",
    "is_hidden",
    "last_points",
    "metric_group",
    "new_uuid",
    "read_runs",
    "run_name",
    "tag_label",
]

_NOTE = "mlflow.note.content"
"""Tag with the description of a run."""
_LOST = "lost:"
"""First word of the error of a run whose program was silent."""
_MAX_ITEMS = 2000
"""Maximum number of parameters, and of tags, of a run."""
_MAX_KEY = 250
_MAX_VALUE = 8000
_NAME = 255
_VALIDATION = re.compile(r"(?:^|[/_. -])(?:val|valid|validation|eval|evaluation|test)(?:$|[/_. -])")
_LAST_POINTS = (
    "SELECT k.group_name, k.name, p.step, p.value, p.time FROM points p "  # noqa: S608 - our own words
    "JOIN (SELECT trial_id, key_id, max(last_step) AS step FROM rollups "
    f"WHERE trial_id = ? AND shift = {SHIFTS[-1]} GROUP BY trial_id, key_id) AS l "
    "ON l.trial_id = p.trial_id AND l.key_id = p.key_id AND l.step = p.step "
    "JOIN metric_keys k ON k.id = p.key_id ORDER BY k.name"
)
_AT_ZERO = "SELECT value, time FROM points WHERE trial_id = ? AND key_id = ? AND step IN (0, ?)"
_LAST_STEP = (
    "SELECT max(last_step) FROM rollups WHERE trial_id = ? AND key_id = ? "  # noqa: S608 - our own words
    f"AND shift = {SHIFTS[-1]}"
)


class Metric(msgspec.Struct, frozen=True):
    """Value of a metric."""

    key: str
    value: float
    time: float
    step: int


class MlflowRun(msgspec.Struct, frozen=True):
    """Run in MLflow's terms, with the states of its experiment here."""

    uuid: str
    mlflow_experiment_id: int
    experiment_id: int
    trial_id: int
    run_id: int
    name: str
    stage: str
    params: dict[str, str]
    tags: dict[str, str]
    start_ms: int
    end_ms: int | None
    owner_id: int
    trial_state: str
    ended_at: float | None
    error: str

    @property
    def status(self) -> str:
        """Status in MLflow's terms."""
        ended = {
            TrialState.COMPLETED: "FINISHED",
            TrialState.ERROR: "FAILED",
            TrialState.CANCELED: "KILLED",
        }
        return ended.get(TrialState(self.trial_state), "RUNNING")

    @property
    def is_lost(self) -> bool:
        """Whether the run ended only since its program was silent."""
        return self.trial_state == TrialState.ERROR and self.error.startswith(_LOST)


def find_run(connection: Any, run_uuid: str) -> MlflowRun:
    """Return a run.

    Raises:
        NotFoundError: If there is no such run.
    """
    runs = read_runs(connection, mlflow_runs.c.uuid == run_uuid)
    if not runs:
        raise NotFoundError(f"Run with id={run_uuid[:100]} not found")
    return runs[0]


def read_runs(connection: Any, condition: Any) -> list[MlflowRun]:
    """Return runs, newest first; those whose experiment was deleted are left out."""
    columns = mlflow_runs.c
    query = (
        select(
            mlflow_runs, experiments.c.owner_id, trials.c.state, trials.c.ended_at, trials.c.error
        )
        .join(experiments, experiments.c.id == columns.experiment_id)
        .join(trials, trials.c.id == columns.trial_id)
        .where(condition)
        .order_by(columns.start_ms.desc(), columns.uuid)
    )
    decode = msgspec.json.decode
    return [
        MlflowRun(
            row.uuid, row.mlflow_experiment_id, row.experiment_id, row.trial_id, row.run_id,
            row.name, row.stage, decode(row.params), decode(row.tags), row.start_ms, row.end_ms,
            row.owner_id, row.state, row.ended_at, row.error or "",
        )
        for row in connection.execute(query)
    ]  # fmt: skip


def metric_group(key: str) -> str:
    """Return the group in which a metric is shown; the same as for imported runs."""
    if key.startswith("system/"):
        return "system"
    return "validation" if _VALIDATION.search(key.lower()) else "training"


def last_points(connection: Any, trial_id: int) -> list[Metric]:
    """Return the last value of each metric of a trial."""
    rows = raw_rows(connection, _LAST_POINTS, (trial_id,))
    return [
        Metric(name, float("nan") if value is None else value, time, step)
        for _, name, step, value, time in rows
    ]


def is_hidden(orchestrator: Orchestrator, number: int, name: str) -> bool:
    """Check whether the project of an MLflow experiment is hidden from the caller of the request.

    Args:
        orchestrator: State of the server, with the projects.
        number: Id of the MLflow experiment; 0 is in the project ``default``.
        name: Name of the MLflow experiment.
    """
    hidden = map(orchestrator.projects.name_of, HIDDEN.get())
    return number != 0 and project_name(name) in hidden


class MlflowService(Service):
    """Changes of MLflow's experiments and runs."""

    external_runs = Uses(ExternalRunService)
    operations = Uses(OperationService)
    reports = Uses(ReportService)
    metric_names = Uses(MetricNameService)

    def create_experiment(self, name: str, tags: Mapping[str, str], owner_id: int) -> int | None:
        """Create an experiment; return its id, or None if the name is in use.

        Raises:
            ConfigError: If the name or a tag is invalid.
        """
        _check_text("name", name, 500)
        same_name = select(mlflow_experiments.c.id).where(mlflow_experiments.c.name == name)
        if self.work.connection.scalar(same_name) is not None:
            return None
        now = self.work.clock()
        row = {
            "name": name,
            "owner_id": owner_id,
            "stage": "active",
            "tags": _merged({}, tags),
            "created_at": now,
            "updated_at": now,
        }
        insert = mlflow_experiments.insert().values(row).returning(mlflow_experiments.c.id)
        return int(self.work.connection.execute(insert).scalar_one())

    def update_experiment(self, experiment_id: int, **changes: Any) -> None:
        """Change the name, the stage or the tags of an experiment.

        Raises:
            ConfigError: If the name is invalid.
            ConflictError: If the name is in use.
        """
        columns = mlflow_experiments.c
        if "name" in changes:
            name = changes["name"]
            _check_text("new_name", name, 500)
            same_name = select(columns.id).where(columns.name == name, columns.id != experiment_id)
            if self.work.connection.scalar(same_name) is not None:
                raise ConflictError(f"Experiment '{name}' already exists")
        values = {**changes, "updated_at": self.work.clock()}
        statement = update(mlflow_experiments).where(columns.id == experiment_id)
        self.work.connection.execute(statement.values(values))

    def tag_experiment(self, experiment_id: int, tags: str, key: str, value: str | None) -> None:
        """Set or delete a tag of an experiment; ``tags`` are those it has."""
        changed = _merged(msgspec.json.decode(tags), {key: value})
        self.update_experiment(experiment_id, tags=changed)

    def add_run(self, run: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Add the row of a run that was opened in this transaction."""
        row = {**run, "stage": "active", "params": "{}", "tags": _merged({}, tags)}
        self.work.connection.execute(mlflow_runs.insert().values(row))
        self._describe(run["experiment_id"], {}, tags)

    def log(
        self,
        run: MlflowRun,
        metrics: Sequence[Metric] = (),
        params: Iterable[tuple[str, str]] = (),
        tags: Iterable[tuple[str, str | None]] = (),
    ) -> bool:
        """Store metrics, parameters and tags of a run; a tag without a value is deleted.

        Returns:
            Whether they are stored; False if a user has canceled the run here.

        Raises:
            ConfigError: If one is invalid, or changes a parameter.
            StaleRunError: If the run was canceled before.
            NotFoundError: If the tag to delete is missing.
        """
        is_open = self._is_open(run)
        if is_open is None:
            return False
        run = find_run(self.work.connection, run.uuid)
        if new_params := dict(params):
            self._add_params(run, new_params)
        if new_tags := dict(tags):
            self._save(run, tags=_merged(run.tags, new_tags))
            self._describe(run.experiment_id, run.tags, new_tags)
        if metrics:
            self._add_metrics(run, metrics, is_open=is_open)
        return True

    def _is_open(self, run: MlflowRun) -> bool | None:
        """Check whether a run may report; None if it was canceled just now.

        Raises:
            StaleRunError: If it was canceled before.
        """
        row, trial = self.work.find(RunRow, run.run_id), self.work.find(TrialRow, run.trial_id)
        if trial.state == TrialState.CANCELED:
            raise StaleRunError(f"run {run.uuid} was canceled in experiment {run.experiment_id}")
        if row.state == RunState.EXITED:
            return False
        if row.killed or row.directive == "stop":
            self.external_runs.end(run.run_id, None)
            return None
        return True

    def _add_params(self, run: MlflowRun, new: Mapping[str, str]) -> None:
        masked: dict[str, str] = mask_secrets({"data": dict(new)})["data"]
        for key, value in masked.items():
            if run.params.get(key, value) != value:
                problem = f"{key}: must keep its value {run.params[key]!r} during a run"
                text = f"{problem}, got {value!r}; log it under another name"
                raise ConfigError("params", [text])
        params = _merged(run.params, masked)
        self._save(run, params=params)
        hparams = {key: _typed(value) for key, value in msgspec.json.decode(params).items()}
        text = msgspec.json.encode(hparams).decode()
        self.work.save(trials, run.trial_id, hparams=text)
        self.work.touch("trial", run.experiment_id, run.trial_id)

    def _add_metrics(self, run: MlflowRun, metrics: Sequence[Metric], *, is_open: bool) -> None:
        records: dict[tuple[str, int, float], dict[str, float | str]] = {}
        for metric in self._placed(run.trial_id, metrics):
            place = (metric_group(metric.key), metric.step, metric.time)
            records.setdefault(place, {})[metric.key] = metric.value
        batch = [
            MetricsRecord(group, step, values, time)
            for (group, step, time), values in records.items()
        ]
        if is_open:
            last = self.work.find(RunRow, run.run_id).last_seq
            self.reports.store(run.run_id, ReportBatch(last + 1, list[Record](batch)))
            return
        # A client may evaluate a model after the end of its run.
        check_times([record.time for record in batch])
        points = PointReader(self.metric_names, run.trial_id)
        store_points(
            self.work, run.trial_id, [point for record in batch for point in points.read(record)]
        )
        self.work.touch("trial", run.experiment_id, run.trial_id)

    def _placed(self, trial_id: int, metrics: Sequence[Metric]) -> list[Metric]:
        """Give further values at step 0 the next step, except those that were sent again."""
        placed = []
        last: dict[str, Metric | None] = {}
        for metric in metrics:
            if metric.step != 0:
                if metric.key not in last or (last[metric.key] or metric).step <= metric.step:
                    last[metric.key] = metric
                placed.append(metric)
                continue
            if metric.key not in last:
                last[metric.key] = self._last(trial_id, metric)
            previous = last[metric.key]
            if previous is None:
                last[metric.key] = metric
                placed.append(metric)
            elif (previous.time, previous.value) != (metric.time, metric.value):
                moved = msgspec.structs.replace(metric, step=previous.step + 1)
                last[metric.key] = moved
                placed.append(moved)
        return placed

    def _last(self, trial_id: int, metric: Metric) -> Metric | None:
        """Return the last point of a metric that has a value at step 0, or an equal point."""
        ids = self.work.orchestrator.metrics.keys.known(metric_group(metric.key))
        key_id = ids.get(metric.key)
        if key_id is None:
            known = "SELECT id FROM metric_keys WHERE group_name = ? AND name = ?"
            rows = self.work.raw(known, (metric_group(metric.key), metric.key))
            if not rows:
                return None
            key_id = rows[0][0]
        ((step,),) = self.work.raw(_LAST_STEP, (trial_id, key_id))
        if step is None:
            return None
        rows = self.work.raw(_AT_ZERO, (trial_id, key_id, step))
        if any((time, value) == (metric.time, metric.value) for value, time in rows):
            return metric
        at_zero = "SELECT 1 FROM points WHERE trial_id = ? AND key_id = ? AND step = 0"
        if not self.work.raw(at_zero, (trial_id, key_id)):
            return None
        return Metric(metric.key, float("nan"), -1.0, step)

    def update_run(
        self, run: MlflowRun, name: str | None, status: str | None, end_ms: int | None
    ) -> None:
        """Rename a run, or end it.

        Raises:
            ConfigError: If the name is invalid.
        """
        if name:
            _check_text("run_name", name, _NAME)
            self._save(run, name=name, tags=_merged(run.tags, {"mlflow.runName": name}))
            self.work.save(experiments, run.experiment_id, name=name)
            self.work.touch("experiment", run.experiment_id, run.experiment_id)
        if status in {"FINISHED", "FAILED", "KILLED"}:
            self._save(run, end_ms=end_ms)
            if status == "KILLED" and run.status == "RUNNING":
                trial = self.work.find(TrialRow, run.trial_id)
                self.operations.stop_trial(trial, "cancel")
            error = "its program reported FAILED" if status == "FAILED" else None
            self.external_runs.end(run.run_id, error)
        elif end_ms is not None:
            self._save(run, end_ms=end_ms)

    def move_run(self, run: MlflowRun, stage: str) -> None:
        """Delete or restore a run in MLflow's sense: its experiment is archived."""
        if stage == "deleted" and run.status == "RUNNING":
            self.external_runs.end(run.run_id, "its program deleted the run")
        self._save(run, stage=stage)
        archived = int(stage == "deleted")
        self.work.save(experiments, run.experiment_id, archived=archived)
        self.work.touch("experiment", run.experiment_id, run.experiment_id)

    def set_row(self, run: MlflowRun, run_id: int) -> None:
        """Store the id of the run that continues a run."""
        self._save(run, run_id=run_id, end_ms=None)

    def _save(self, run: MlflowRun, **values: Any) -> None:
        statement = update(mlflow_runs).where(mlflow_runs.c.uuid == run.uuid).values(values)
        self.work.connection.execute(statement)

    def _describe(
        self, experiment_id: int, old: Mapping[str, str], new: Mapping[str, str | None]
    ) -> None:
        """Update the labels and the description of an experiment after a change of tags."""
        experiment = self.work.find(ExperimentRow, experiment_id)
        removed = {tag_label(key, old[key]) for key in new if key in old}
        labels = [label for label in msgspec.json.decode(experiment.labels) if label not in removed]
        labels += [tag_label(key, value) for key, value in new.items() if value is not None]
        unique = list(dict.fromkeys(label for label in labels if label))[:LABELS]
        changes: dict[str, Any] = {"labels": msgspec.json.encode(unique).decode()}
        if _NOTE in new:
            changes["description"] = (new[_NOTE] or "")[:_MAX_VALUE]
        self.work.save(experiments, experiment_id, **changes)
        self.work.touch("experiment", experiment_id, experiment_id)


def tag_label(key: str, value: str) -> str:
    """Return the label of a tag; empty for tags that MLflow itself sets."""
    return "" if key.startswith("mlflow.") else printable(f"{key}={value}")[:LABEL_CHARACTERS]


def new_uuid() -> str:
    """Return the id of a new run."""
    return uuid.uuid4().hex


def run_name(name: str, run_uuid: str) -> str:
    """Return the name of a new run; its id if the client chose none."""
    return printable(name)[:_NAME] or f"run-{run_uuid[:8]}"


def _merged(items: Mapping[str, str], changes: Mapping[str, str | None]) -> str:
    """Return parameters or tags as JSON after changes; None deletes one.

    Raises:
        ConfigError: If a key or a value is invalid, or there are too many.
        NotFoundError: If a deleted one is missing.
    """
    merged = dict(items)
    for key, value in changes.items():
        if value is None:
            if key not in merged:
                raise NotFoundError(f"there is no tag with the key {key[:100]!r}")
            del merged[key]
            continue
        _check_text("key", key, _MAX_KEY)
        if len(value) > _MAX_VALUE:
            problem = f"{key}: must have at most {_MAX_VALUE} characters, got {len(value)}"
            raise ConfigError("value", [problem])
        merged[key] = value
    if len(merged) > _MAX_ITEMS:
        problem = f"must be at most {_MAX_ITEMS} parameters and as many tags, got {len(merged)}"
        raise ConfigError("run", [problem])
    return msgspec.json.encode(merged).decode()


def _check_text(name: str, text: str, limit: int) -> None:
    if not 0 < len(text) <= limit:
        problem = f"must have 1 to {limit} characters, got {len(text)}"
        raise ConfigError("request", [f"{name}: {problem}"])
    if problem := text_problem(text) or "":
        raise ConfigError("request", [f"{name}: {problem}"])


def _typed(text: str) -> Any:
    """Return the number or Boolean that a client has written as a text, or the text."""
    if text in {"True", "False"}:
        return text == "True"
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text
