"""Batches of records: validated, stored exactly once, and processed."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import update

from zerolab.contract.media import MediaRecord
from zerolab.contract.messages import (
    AlertRecord,
    CheckpointRecord,
    MetricsRecord,
    ProgressRecord,
    Record,
    ReportBatch,
    wire_number,
)
from zerolab.contract.notifications import alert_text
from zerolab.contract.secret_text import mask_values
from zeroserver.orchestrator.checkpoints.checkpoint_service import (
    CheckpointService,
    check_checkpoint,
)
from zeroserver.orchestrator.exit_service import missing_metric_error
from zeroserver.orchestrator.ingest.media_service import MediaService
from zeroserver.orchestrator.ingest.metric_names import MetricNameService
from zeroserver.orchestrator.ingest.values import PointReader, check_times, stored_number
from zeroserver.orchestrator.run_service import RunService, shown_activity
from zeroserver.orchestrator.scheduling import SchedulingService
from zeroserver.orchestrator.search.operation_service import OperationService
from zeroserver.orchestrator.search.search_service import Event
from zeroserver.orchestrator.search.warm_start import WarmStartService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.states import TRIAL_ENDED, ExperimentState
from zeroserver.store.points import Point, store_points
from zeroserver.store.rows import ExperimentRow, Reporting
from zeroserver.store.schema import experiments, trials

__all__ = ["ReportService", "best_of", "split_reports"]

_VALUES = 4000
"""Number of values that one transaction stores: some 100 ms of the writer."""
_MEDIUM = 20
"""Number of values that a medium counts as."""
_HEAVY = 200
"""Number of values that a validation or checkpoint counts as, since it is processed further."""


class _BatchSummary(msgspec.Struct):
    """Combined changes of a batch of records."""

    points: list[Point] = msgspec.field(default_factory=list)
    steps: int = 0
    changes: dict[str, Any] = msgspec.field(default_factory=dict)
    """Columns of the trial to update."""
    media: list[MediaRecord] = msgspec.field(default_factory=list)
    notable: list[MetricsRecord | CheckpointRecord] = msgspec.field(default_factory=list)
    """Validations and checkpoints, which need further processing."""
    alerts: list[AlertRecord] = msgspec.field(default_factory=list)
    nan: tuple[str, int] | None = None
    """Metric and step of the first NaN."""


_SEARCHING = {ExperimentState.ACTIVE, ExperimentState.PAUSED}


class ReportService(Service):
    """Stores reports of runs exactly once and triggers the resulting actions."""

    operations = Uses(OperationService)
    runs = Uses(RunService)
    scheduling = Uses(SchedulingService)
    checkpoints = Uses(CheckpointService)
    warm_starts = Uses(WarmStartService)
    metric_names = Uses(MetricNameService)
    media = Uses(MediaService)

    def store(self, run_id: int, batch: ReportBatch) -> int:
        """Store the new records of a batch; return the number of the last stored record.

        A batch after a gap is ignored; the returned number shows that to the sender.

        Raises:
            NotFoundError: If there is no such run.
            StaleRunError: If the run has ended, or another run has taken over.
            ConfigError: If a record has an invalid value.
        """
        run = self.runs.reporting(run_id)
        stored = run.last_seq
        if batch.first > stored + 1 or batch.first < 1:
            return stored
        fresh = batch.records[stored + 1 - batch.first :]
        if not fresh:
            return stored
        summary = self._read(run.trial_id, fresh)
        store_points(self.work, run.trial_id, summary.points)
        if summary.media:
            self.media.store(run.trial_id, summary.media)
        if summary.steps > run.steps_completed:
            statement = "UPDATE trials SET steps_completed = ? WHERE id = ?"
            self.work.run(statement, (summary.steps, run.trial_id))
        if summary.changes:
            self.work.save(trials, run.trial_id, **summary.changes)
        if summary.alerts or summary.nan:
            self._notify(run, summary)
        if "progress" in summary.changes:
            self._follow_only_trial(run.experiment_id, summary.changes["progress"])
        last = stored + len(fresh)
        self.work.run("UPDATE runs SET last_seq = ? WHERE id = ?", (last, run_id))
        if self._consequences(run, summary.notable):
            self.scheduling.schedule()
        self._announce(run, fresh)
        return last

    def _read(self, trial_id: int, fresh: list[Record]) -> _BatchSummary:
        """Validate the records of a batch and collect their changes."""
        summary = _BatchSummary()
        points = PointReader(self.metric_names, trial_id)
        check_times([record.time for record in fresh])
        for record in fresh:
            if isinstance(record, MetricsRecord):
                summary.points += points.read(record)
                if record.steps > summary.steps and record.group != "system":
                    summary.steps = record.steps
                if record.group == "validation":
                    summary.notable.append(record)
            elif isinstance(record, ProgressRecord):
                if math.isfinite(record.value):
                    summary.changes["progress"] = min(max(record.value, 0.0), 1.0)
            elif isinstance(record, CheckpointRecord):
                check_checkpoint(record)
                summary.notable.append(record)
            elif isinstance(record, MediaRecord):
                summary.media.append(record)
            elif isinstance(record, AlertRecord):
                summary.alerts.append(record)
            else:
                summary.changes["activity"] = shown_activity(record.state)
        summary.nan = points.nan
        return summary

    def _notify(self, run: Reporting, summary: _BatchSummary) -> None:
        """Store alerts in the log, and pass them and the first NaN to extensions."""
        for alert in summary.alerts:
            secrets = self.work.secrets_of(run.experiment_id)
            title, text = (
                mask_values(part, secrets) for part in alert_text(alert.title, alert.text)
            )
            line = f"{title}: {text}" if text else title
            self.work.log_line(run, f"alert: {line}", "WARNING")
            self.work.emit("alert", run.experiment_id, run.trial_id, title=title, text=text)
        if summary.nan is not None:
            name, step = summary.nan
            text = f"{name} is NaN at batch {step}"
            self.work.emit("nan", run.experiment_id, run.trial_id, text=text)

    def _follow_only_trial(self, experiment_id: int, progress: float) -> None:
        """Set the progress of an experiment with one trial; it never decreases."""
        if not self.work.config(experiment_id).searcher.has_one_trial:
            return
        columns = experiments.c
        self.work.connection.execute(
            update(experiments)
            .where(columns.id == experiment_id, columns.progress < progress)
            .values(progress=progress)
        )

    def _consequences(
        self,
        run: Reporting,
        notable: list[MetricsRecord | CheckpointRecord],
    ) -> bool:
        """Process validations and checkpoints in the order of the records.

        Returns:
            Whether other trials may now be able to start.
        """
        may_start_more = False
        for record in notable:
            experiment = self.work.experiment_of(run)
            if isinstance(record, CheckpointRecord):
                steps = record.steps_completed
                if self.checkpoints.add(run, record):
                    self.scheduling.grow(run.id, steps)
                    may_start_more |= self.warm_starts.settle_sources(run.trial_id)
            else:
                steps = record.steps
                may_start_more |= self._validated(run, record)
            self.checkpoints.choose_best(experiment, run.trial_id)
            self.checkpoints.apply_after_report(run.trial_id, steps)
        return may_start_more

    def _announce(self, run: Reporting, fresh: list[Record]) -> None:
        """Publish the records to the event streams, if they have readers."""
        experiment_id, trial_id = run.experiment_id, run.trial_id
        if not self.work.has_readers(experiment_id):
            return
        self.work.touch("trial", experiment_id, trial_id)
        if not self.work.has_readers(experiment_id, of_all=True):
            return
        curves: dict[tuple[str, str], list[list[Any]]] = {}
        for record in fresh:
            if isinstance(record, MetricsRecord):
                for name, value in record.values.items():
                    number = stored_number(name, value)
                    wire = "NaN" if number is None else wire_number(number)
                    curves.setdefault((record.group, name), []).append([record.steps, wire])
        if curves:
            metrics = [
                {"group": group, "name": name, "points": curve}
                for (group, name), curve in curves.items()
            ]
            data = {"experiment_id": experiment_id, "trial_id": trial_id, "metrics": metrics}
            self.work.touch(
                "metric", experiment_id, msgspec.json.encode(data)
            )  # bytes need a tenth of the memory

    def _validated(self, run: Reporting, record: MetricsRecord) -> bool:
        """Store a validation and pass it to the searcher; return whether the searcher acts."""
        experiment = self.work.experiment_of(run)
        trial = self.work.trial_of(run)
        metric = experiment.metric
        if not metric:  # a single trial needs no metric
            return False
        value: float | None = None
        if metric in record.values:
            before = None
            if trial.best_validation is not None and trial.best_steps is not None:
                before = (trial.best_validation, trial.best_steps)
            value, best = best_of(metric, experiment.smaller_is_better, record, before)
            changes: dict[str, Any] = {"latest_validation": value}
            if best is not None:
                changes |= {"best_validation": best[0], "best_steps": best[1]}
            self.work.save(trials, trial.id, **changes)
            if value is not None and _better(
                experiment.smaller_is_better, value, experiment.best_validation
            ):
                best_columns = {"best_validation": value, "best_trial_id": trial.id}
                self.work.save(experiments, experiment.id, **best_columns)
                self.work.touch("experiment", experiment.id, experiment.id)
                if experiment.best_validation is not None:
                    text = f"{metric} {value:.6g} at batch {record.steps}, "
                    text += f"before {experiment.best_validation:.6g}"
                    self.work.emit("improved", experiment.id, trial.id, text=text)
        done = trial.stop is not None or trial.state in TRIAL_ENDED
        repeated = record.steps <= trial.searcher_steps  # a restarted trial repeats reports
        if done or repeated or experiment.state not in _SEARCHING:
            return False
        length = self._length(experiment, record)
        if metric not in record.values or isinstance(length, str):
            problem = length if isinstance(length, str) else _missing(metric, record)
            is_rung = length in self.work.config(experiment.id).searcher.validate_at()
            if is_rung and not isinstance(length, str):
                problem = f"{missing_metric_error(length, metric)}; {_there_are(record)}"
            # Any later validation that is not at a rung is ignored; the searcher waits for the
            # next.
            if is_rung or trial.searcher_steps < 0:
                self.work.log_line(run, problem, "ERROR")
                self.work.save(trials, trial.id, error=problem)
                self.operations.stop_trial(trial, "error")
            return False
        self.work.save(trials, trial.id, searcher_steps=record.steps)
        event = Event("validated", trial.request_id, value, length)
        has_operations = self.operations.add_event(experiment.id, event)
        self._pause_if_due(run, length)
        return has_operations

    def _pause_if_due(self, run: Reporting, length: float) -> None:
        """Preempt a trial that has reached the length set by the searcher."""
        trial = self.work.trial_of(run)
        if trial.stop is None and trial.until is not None and length >= trial.until:
            self.work.save(trials, trial.id, waits=1)
            self.runs.direct(run.id, "preempt")

    def _length(self, experiment: ExperimentRow, record: MetricsRecord) -> float | str:
        """Return the trial's length in the searcher's unit, or why it is unknown."""
        searcher = self.work.config(experiment.id).searcher
        if searcher.unit != "epochs":
            return float(record.steps)
        if "epochs" in record.values:
            return stored_number("epochs", record.values["epochs"]) or 0.0
        if not searcher.validate_at():
            return 0.0  # used only for progress
        return "epochs: must be among the validation metrics, for the searcher counts in them"


def split_reports(batch: ReportBatch) -> Iterator[ReportBatch]:
    """Split a batch into parts small enough for one database transaction each."""
    first, weight = 0, 0
    for index, record in enumerate(batch.records):
        weight += _weight(record)
        if weight >= _VALUES:
            yield ReportBatch(batch.first + first, batch.records[first : index + 1])
            first, weight = index + 1, 0
    if first < len(batch.records) or not batch.records:
        yield ReportBatch(batch.first + first, batch.records[first:])


def _weight(record: Record) -> int:
    """Return the cost of storing a record, in values."""
    if isinstance(record, MediaRecord):
        return _MEDIUM
    plain = isinstance(record, MetricsRecord) and record.group != "validation"
    return len(record.values) if plain else _HEAVY  # type: ignore[union-attr]


def _missing(metric: str, record: MetricsRecord) -> str:
    listed = _there_are(record)
    return f"searcher.metric: must be one of the validation metrics, got {metric!r}; {listed}"


def _there_are(record: MetricsRecord) -> str:
    names = ", ".join(sorted(set(record.values) - {"batches", "epochs"})) or "none"
    return f"there are: {names}"[:1800]


def best_of(
    metric: str, smaller_is_better: int, record: MetricsRecord, best: tuple[float, int] | None
) -> tuple[float | None, tuple[float, int] | None]:
    """Return the searcher's metric of a validation, and the new best value with its step."""
    value = stored_number(metric, record.values[metric])
    if value is not None and _better(smaller_is_better, value, best[0] if best else None):
        best = (value, record.steps)
    return value, best


def _better(smaller_is_better: int, value: float, best: float | None) -> bool:
    if best is None:
        return True
    return value < best if smaller_is_better else value > best
