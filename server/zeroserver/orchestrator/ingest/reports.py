"""Batches of records: validated, stored exactly once, and dispatched."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import update

from zerolab.contract.messages import (
    CheckpointRecord,
    MetricsRecord,
    ProgressRecord,
    Record,
    ReportBatch,
    wire_number,
)
from zeroserver.orchestrator.checkpoints.retention import apply_after_report
from zeroserver.orchestrator.ingest.checkpoints import (
    check_checkpoint,
    choose_best_checkpoint,
    note_checkpoint,
)
from zeroserver.orchestrator.ingest.sender import Reporting, reporting_run
from zeroserver.orchestrator.ingest.validations import validated
from zeroserver.orchestrator.ingest.values import PointReader, check_times, stored_number
from zeroserver.orchestrator.runs import shown_activity
from zeroserver.orchestrator.scheduling import schedule
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.store.points import Point, store_points
from zeroserver.store.schema import experiments, trials

__all__ = ["parts_of", "store_reports"]

_VALUES = 4000
"""Values that one change stores: some 100 ms of the writer."""
_HEAVY = 200
"""Values that a validation or a checkpoint counts for, which the searcher is told of."""


def parts_of(batch: ReportBatch) -> Iterator[ReportBatch]:
    """Split a batch into parts small enough for one database transaction each."""
    first, weight = 0, 0
    for index, record in enumerate(batch.records):
        plain = isinstance(record, MetricsRecord) and record.group != "validation"
        weight += len(record.values) if plain else _HEAVY  # type: ignore[union-attr]
        if weight >= _VALUES:
            yield ReportBatch(batch.first + first, batch.records[first : index + 1])
            first, weight = index + 1, 0
    if first < len(batch.records) or not batch.records:
        yield ReportBatch(batch.first + first, batch.records[first:])


def store_reports(work: UnitOfWork, run_id: int, batch: ReportBatch) -> int:
    """Store the records of a batch that are new; return the number of the last one stored.

    A batch that begins behind a gap is not stored: the sender sees so from the number.

    Raises:
        NotFoundError: If there is no such run.
        StaleRunError: If the run has ended, or another run has taken over.
        ConfigError: If a record holds what cannot be stored.
    """
    run = reporting_run(work, run_id)
    stored = run["last_seq"]
    if batch.first > stored + 1 or batch.first < 1:
        return stored
    fresh = batch.records[stored + 1 - batch.first :]
    if not fresh:
        return stored
    summary = _read(work, run["trial_id"], fresh)
    store_points(work, run["trial_id"], summary.points)
    if summary.steps > run["steps_completed"]:
        statement = "UPDATE trials SET steps_completed = ? WHERE id = ?"
        work.run(statement, (summary.steps, run["trial_id"]))
    if summary.changes:
        work.save(trials, run["trial_id"], **summary.changes)
    if "progress" in summary.changes:
        _follow_only_trial(work, run["experiment_id"], summary.changes["progress"])
    last = stored + len(fresh)
    work.run("UPDATE runs SET last_seq = ? WHERE id = ?", (last, run_id))
    if _consequences(work, run, summary.notable):
        schedule(work)
    _announce(work, run, fresh)
    return last


@dataclass
class _BatchSummary:
    """What a batch says."""

    points: list[Point] = field(default_factory=list)
    steps: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    """Columns of the trial."""
    notable: list[MetricsRecord | CheckpointRecord] = field(default_factory=list)
    """Validations and checkpoints, which have effects of their own."""


def _read(work: UnitOfWork, trial_id: int, fresh: list[Record]) -> _BatchSummary:
    """Check every record of a batch and sort out what it says."""
    summary = _BatchSummary()
    points = PointReader(work, trial_id)
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
        else:
            summary.changes["activity"] = shown_activity(record.state)
    return summary


def _follow_only_trial(work: UnitOfWork, experiment_id: int, progress: float) -> None:
    """Let an experiment of one trial be as far as the trial; a restart does not set it back."""
    if not work.config(experiment_id).searcher.has_one_trial:
        return
    columns = experiments.c
    work.connection.execute(
        update(experiments)
        .where(columns.id == experiment_id, columns.progress < progress)
        .values(progress=progress)
    )


def _consequences(
    work: UnitOfWork,
    run: Reporting,
    notable: list[MetricsRecord | CheckpointRecord],
) -> bool:
    """Let validations and checkpoints have their effects, in the order of the records.

    Returns:
        Whether trials may start now that could not before.
    """
    more = False
    for record in notable:
        experiment = work.experiment_of(run)
        if isinstance(record, CheckpointRecord):
            steps = record.steps_completed
            more |= note_checkpoint(work, run, record)
        else:
            steps = record.steps
            more |= validated(work, run, record)
        choose_best_checkpoint(work, experiment, run["trial_id"])
        apply_after_report(work, run["trial_id"], steps)
    return more


def _announce(work: UnitOfWork, run: Reporting, fresh: list[Record]) -> None:
    """Tell the event streams, if anyone reads them."""
    experiment_id, trial_id = run["experiment_id"], run["trial_id"]
    if not work.has_readers(experiment_id):
        return
    work.touch("trial", experiment_id, trial_id)
    if not work.has_readers(experiment_id, of_all=True):
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
            {"group": group, "name": name, "points": found}
            for (group, name), found in curves.items()
        ]
        data = {"experiment_id": experiment_id, "trial_id": trial_id, "metrics": metrics}
        work.touch("metric", experiment_id, msgspec.json.encode(data))  # a tenth of it
