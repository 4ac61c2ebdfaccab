"""What a run reports: metrics, progress, checkpoints and logs, each stored exactly once."""

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec
from sqlalchemy import RowMapping, select, update

from zerolab.contract.wire import (
    CheckpointRecord,
    LogBatch,
    LogEntry,
    MetricsRecord,
    ProgressRecord,
    Record,
    ReportBatch,
    plain_number,
    wire_number,
)
from zerolab.errors import ConfigError
from zeroserver.orchestrator.checkpoints.retention import apply_after_report
from zeroserver.orchestrator.cluster.growing import grow
from zeroserver.orchestrator.desk import (
    Fields,
    World,
    find,
    log_line,
    save,
    storage_of,
    touch,
)
from zeroserver.orchestrator.log_policies import Match, apply_matches
from zeroserver.orchestrator.nodes import next_log, save_next_log
from zeroserver.orchestrator.runs import current_run, no_metric_at, shown_activity
from zeroserver.orchestrator.scheduling import schedule
from zeroserver.orchestrator.searching import Event
from zeroserver.orchestrator.trials import direct_run, stop_trial, tell_searcher
from zeroserver.orchestrator.warm_start import settle_sources
from zeroserver.states import TRIAL_ENDED, ExperimentState, RunState
from zeroserver.store.database import Transaction
from zeroserver.store.points import MAX_STEP, Point, store_points
from zeroserver.store.schema import checkpoints, experiments, logs, points, runs, trials

__all__ = ["best_of", "check_time", "read_points", "store_logs", "store_reports"]

_YEAR_10000 = 253_402_300_800

_SEARCHING = {ExperimentState.ACTIVE, ExperimentState.PAUSED}


def store_reports(world: World, transaction: Transaction, run_id: int, batch: ReportBatch) -> int:
    """Store the records of a batch that are new; return the number of the last one stored.

    A batch that begins behind a gap is not stored: the sender sees so from the number.

    Raises:
        NotFoundError: If there is no such run.
        StaleRunError: If the run has ended, or another run has taken over.
        ConfigError: If a record holds what cannot be stored.
    """
    run = _reporting(transaction, run_id)
    stored = run["last_seq"]
    if batch.first > stored + 1 or batch.first < 1:
        return stored
    fresh = batch.records[stored + 1 - batch.first :]
    if not fresh:
        return stored
    told = _read(world, transaction, fresh)
    store_points(transaction, run["trial_id"], told.points)
    if told.steps > run["steps_completed"]:
        statement = "UPDATE trials SET steps_completed = ? WHERE id = ?"
        transaction.run(statement, (told.steps, run["trial_id"]))
    if told.changes:
        save(transaction, trials, run["trial_id"], **told.changes)
    if "progress" in told.changes:
        _follow_only_trial(world, transaction, run["experiment_id"], told.changes["progress"])
    last = stored + len(fresh)
    transaction.run("UPDATE runs SET last_seq = ? WHERE id = ?", (last, run_id))
    if _consequences(world, transaction, run, told.notable):
        schedule(world, transaction)
    _announce(world, transaction, run, fresh)
    return last


@dataclass
class _Told:
    """What a batch says."""

    points: list[Point] = field(default_factory=list)
    steps: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    """Columns of the trial."""
    notable: list[MetricsRecord | CheckpointRecord] = field(default_factory=list)
    """Validations and checkpoints, which have effects of their own."""


def _read(world: World, transaction: Transaction, fresh: list[Record]) -> _Told:
    """Check every record of a batch and sort out what it says."""
    told = _Told()
    for record in fresh:
        check_time(record.time)
        if isinstance(record, MetricsRecord):
            told.points += read_points(world, transaction, record)
            if record.steps > told.steps and record.group != "system":
                told.steps = record.steps
            if record.group == "validation":
                told.notable.append(record)
        elif isinstance(record, ProgressRecord):
            if math.isfinite(record.value):
                told.changes["progress"] = min(max(record.value, 0.0), 1.0)
        elif isinstance(record, CheckpointRecord):
            _check_checkpoint(record)
            told.notable.append(record)
        else:
            told.changes["activity"] = shown_activity(record.state)
    return told


class _Reporting(TypedDict):
    """What storing a report needs to know of its run and trial."""

    id: int
    trial_id: int
    experiment_id: int
    last_seq: int
    steps_completed: int


def _reporting(transaction: Transaction, run_id: int) -> _Reporting:
    """Return a run that may report.

    Raises:
        NotFoundError: If there is no such run.
        StaleRunError: If the run has ended, or another run has taken over.
    """
    rows = transaction.raw(
        "SELECT r.trial_id, r.experiment_id, r.last_seq, t.steps_completed FROM runs r "
        "JOIN trials t ON t.id = r.trial_id AND t.run_id = r.id WHERE r.id = ? AND r.state <> ?",
        (run_id, str(RunState.EXITED)),
    )
    if not rows:
        current_run(transaction, run_id)  # says why
    trial_id, experiment_id, last_seq, steps = rows[0]
    return _Reporting(
        id=run_id,
        trial_id=trial_id,
        experiment_id=experiment_id,
        last_seq=last_seq,
        steps_completed=steps,
    )


def _follow_only_trial(
    world: World, transaction: Transaction, experiment_id: int, progress: float
) -> None:
    """Let an experiment of one trial be as far as the trial; a restart does not set it back."""
    if not world.config(transaction, experiment_id).searcher.has_one_trial:
        return
    columns = experiments.c
    transaction.connection.execute(
        update(experiments)
        .where(columns.id == experiment_id, columns.progress < progress)
        .values(progress=progress)
    )


def read_points(world: World, transaction: Transaction, record: MetricsRecord) -> list[Point]:
    """Turn a record into points.

    Raises:
        ConfigError: If it holds what cannot be stored.
    """
    if not 0 <= record.steps < MAX_STEP:
        raise ConfigError("metrics", [f"steps: must be 0 to 2^53, got {record.steps}"])
    group, steps, when = record.group, record.steps, record.time
    find_key = world.keys.find
    return [
        (
            find_key(transaction, group, name),
            steps,
            value if type(value) is float and value == value else _number(name, value),  # noqa: PLR0124 - false for NaN
            when,
        )
        for name, value in record.values.items()
    ]


def check_time(time: float) -> None:
    """Refuse a time that is on no calendar.

    Raises:
        ConfigError: If it is not a finite number of seconds since 1970, before the year 10000.
    """
    if not 0 <= time < _YEAR_10000:  # NaN too
        problem = f"time: must be in seconds since 1970, before the year 10000, got {time}"
        raise ConfigError("record", [problem])


def _number(name: str, value: float | str) -> float | None:
    """Return a value as it is stored; None for NaN."""
    try:
        number = plain_number(value)
    except ValueError as error:
        raise ConfigError("metrics", [f"{name[:100]}: {error}"]) from None
    return None if math.isnan(number) else number


def _check_checkpoint(record: CheckpointRecord) -> None:
    try:
        canonical = str(uuid.UUID(record.uuid)) == record.uuid
    except ValueError:
        canonical = False
    if not canonical or not 0 <= record.steps_completed < MAX_STEP:
        got = f"{record.uuid[:50]!r} and {record.steps_completed}"
        problem = f"uuid, steps_completed: must be a lower-case uuid and at least 0, got {got}"
        raise ConfigError("checkpoint", [problem])


def _consequences(
    world: World,
    transaction: Transaction,
    run: _Reporting,
    notable: list[MetricsRecord | CheckpointRecord],
) -> bool:
    """Let validations and checkpoints have their effects, in the order of the records.

    Returns:
        Whether trials may start now that could not before.
    """
    more = False
    for record in notable:
        experiment = find(transaction, experiments, run["experiment_id"])
        if isinstance(record, CheckpointRecord):
            steps = record.steps_completed
            more |= _checkpoint(world, transaction, run, record)
        else:
            steps = record.steps
            more |= _validated(world, transaction, run, record)
        _choose_best_checkpoint(world, transaction, experiment, run["trial_id"])
        apply_after_report(world, transaction, run["trial_id"], steps)
    return more


def _validated(
    world: World, transaction: Transaction, run: _Reporting, record: MetricsRecord
) -> bool:
    """Store what a validation says of its trial, and tell the searcher; return whether it acts."""
    experiment = find(transaction, experiments, run["experiment_id"])
    trial = find(transaction, trials, run["trial_id"])
    metric = experiment["metric"]
    value: float | None = None
    if metric in record.values:
        before = None
        if trial["best_validation"] is not None:
            before = (trial["best_validation"], trial["best_steps"])
        value, best = best_of(experiment, record, before)
        changes: dict[str, Any] = {"latest_validation": value}
        if best is not None:
            changes |= {"best_validation": best[0], "best_steps": best[1]}
        save(transaction, trials, trial["id"], **changes)
        if value is not None and _better(experiment, value, experiment["best_validation"]):
            winner = {"best_validation": value, "best_trial_id": trial["id"]}
            save(transaction, experiments, experiment["id"], **winner)
            touch(transaction, "experiment", experiment["id"], experiment["id"])
    done = trial["stop"] is not None or trial["state"] in TRIAL_ENDED
    again = record.steps <= trial["searcher_steps"]  # a restarted trial repeats itself
    if done or again or experiment["state"] not in _SEARCHING:
        return False
    length = _length(world, transaction, experiment, record)
    if metric not in record.values or isinstance(length, str):
        problem = length if isinstance(length, str) else _missing(metric, record)
        compared = length in world.config(transaction, experiment["id"]).searcher.validate_at()
        if compared and not isinstance(length, str):
            problem = f"{no_metric_at(length, metric)}; {_there_are(record)}"
        # Any other one is left out, if there was one before: the searcher waits for the next.
        if compared or trial["searcher_steps"] < 0:
            log_line(world, transaction, run, problem, "ERROR")
            save(transaction, trials, trial["id"], error=problem)
            stop_trial(world, transaction, trial, "error")
        return False
    save(transaction, trials, trial["id"], searcher_steps=record.steps)
    event = Event("validated", trial["request_id"], value, length)
    acts = tell_searcher(world, transaction, experiment["id"], event)
    _pause_if_due(transaction, world, run, length)
    return acts


def _pause_if_due(transaction: Transaction, world: World, run: _Reporting, length: float) -> None:
    """Have a trial that the searcher has let go no further give its slots back."""
    trial = find(transaction, trials, run["trial_id"])
    if trial["stop"] is None and trial["until"] is not None and length >= trial["until"]:
        save(transaction, trials, trial["id"], waits=1)
        direct_run(world, transaction, run["id"], "preempt")


def _missing(metric: str, record: MetricsRecord) -> str:
    there = _there_are(record)
    return f"searcher.metric: must be one of the validation metrics, got {metric!r}; {there}"


def _there_are(record: MetricsRecord) -> str:
    names = ", ".join(sorted(set(record.values) - {"batches", "epochs"})) or "none"
    return f"there are: {names}"[:1800]


def _length(
    world: World, transaction: Transaction, experiment: RowMapping, record: MetricsRecord
) -> float | str:
    """How far the trial is, in the searcher's unit; what is wrong where nobody can say."""
    searcher = world.config(transaction, experiment["id"]).searcher
    if searcher.unit != "epochs":
        return float(record.steps)
    if "epochs" in record.values:
        return _number("epochs", record.values["epochs"]) or 0.0
    if not searcher.validate_at():
        return 0.0  # nothing depends on it but progress
    return "epochs: must be among the validation metrics, for the searcher counts in them"


def best_of(
    experiment: Fields, record: MetricsRecord, best: tuple[float, int] | None
) -> tuple[float | None, tuple[float, int] | None]:
    """Return the searcher's metric of a validation, and the best value with its step so far."""
    value = _number(experiment["metric"], record.values[experiment["metric"]])
    if value is not None and _better(experiment, value, best[0] if best else None):
        best = (value, record.steps)
    return value, best


def _better(experiment: Fields, value: float, best: float | None) -> bool:
    if best is None:
        return True
    return value < best if experiment["smaller_is_better"] else value > best


def _checkpoint(
    world: World, transaction: Transaction, run: _Reporting, record: CheckpointRecord
) -> bool:
    """Note a checkpoint; return whether a trial has waited for it."""
    known = select(checkpoints.c.id).where(checkpoints.c.uuid == record.uuid)
    if transaction.connection.scalar(known) is not None:
        return False
    address = storage_of(world, transaction, run["experiment_id"])
    row = {
        "uuid": record.uuid,
        "trial_id": run["trial_id"],
        "experiment_id": run["experiment_id"],
        "run_id": run["id"],
        "steps_completed": record.steps_completed,
        "state": "COMPLETED",
        "size_bytes": sum(record.resources.values()),
        "resources": msgspec.json.encode(record.resources).decode(),
        "metadata": msgspec.json.encode(record.metadata).decode(),
        "path": address.at(record.uuid),
        "created_at": record.time,
    }
    transaction.connection.execute(checkpoints.insert().values(row))
    save(transaction, trials, run["trial_id"], latest_checkpoint=record.uuid)
    touch(transaction, "checkpoint", run["experiment_id"], record.uuid)
    grow(world, transaction, run["id"], record.steps_completed)
    return settle_sources(transaction, run["trial_id"])


def _choose_best_checkpoint(
    world: World, transaction: Transaction, experiment: RowMapping, trial_id: int
) -> None:
    """Name the checkpoint whose validation is the best."""
    key = world.keys.find(transaction, "validation", experiment["metric"])
    order = points.c.value.asc() if experiment["smaller_is_better"] else points.c.value.desc()
    best = transaction.connection.scalar(
        select(checkpoints.c.uuid)
        .select_from(checkpoints)
        .join(points, points.c.step == checkpoints.c.steps_completed)
        .where(
            points.c.trial_id == trial_id,
            points.c.key_id == key,
            points.c.value.is_not(None),
            checkpoints.c.trial_id == trial_id,
            checkpoints.c.state == "COMPLETED",
        )
        .order_by(order, checkpoints.c.id)
        .limit(1)
    )
    if best is not None:
        save(transaction, trials, trial_id, best_checkpoint=best)


def _announce(world: World, transaction: Transaction, run: _Reporting, fresh: list[Record]) -> None:
    """Tell the event streams, if anyone reads them."""
    experiment_id, trial_id = run["experiment_id"], run["trial_id"]
    if not world.journal.wanted(experiment_id):
        return
    touch(transaction, "trial", experiment_id, trial_id)
    if not world.journal.followed(experiment_id):
        return
    curves: dict[tuple[str, str], list[list[Any]]] = {}
    for record in fresh:
        if isinstance(record, MetricsRecord):
            for name, value in record.values.items():
                number = _number(name, value)
                wire = "NaN" if number is None else wire_number(number)
                curves.setdefault((record.group, name), []).append([record.steps, wire])
    if curves:
        metrics = [
            {"group": group, "name": name, "points": found}
            for (group, name), found in curves.items()
        ]
        data = {"experiment_id": experiment_id, "trial_id": trial_id, "metrics": metrics}
        touch(transaction, "metric", experiment_id, msgspec.json.encode(data))  # a tenth of it


def store_logs(
    world: World,
    transaction: Transaction,
    run_id: int,
    batch: LogBatch,
    matches: Sequence[Match] = (),
) -> int:
    """Store the lines of a batch that are new; return the number of the next one wanted.

    Lines are taken from a run that has ended too: they came late, but they are what it said.

    Args:
        world: The orchestrator's memory.
        transaction: Of the writer.
        run_id: Whose lines.
        batch: Numbered lines.
        matches: What the log policies found in the batch.

    Raises:
        NotFoundError: If there is no such run.
    """
    run = find(transaction, runs, run_id)
    wanted = next_log(transaction.connection, run, batch.node)
    if batch.first > wanted or batch.first < 0:
        return wanted
    fresh = batch.entries[wanted - batch.first :]
    if not fresh:
        return wanted
    for entry in fresh:
        check_time(entry.time)
    rows = [_log_row(run, entry) for entry in fresh]
    names = ", ".join(rows[0])
    marks = ", ".join("?" * len(rows[0]))
    transaction.many(
        f"INSERT INTO logs ({names}) VALUES ({marks})",  # noqa: S608 - our own column names
        [tuple(row.values()) for row in rows],
    )
    save_next_log(transaction, run_id, batch.node, wanted + len(fresh))
    skipped = len(batch.entries) - len(fresh)
    apply_matches(transaction, run, [each for each in matches if each.last >= skipped])
    if world.journal.followed(run["experiment_id"]):
        last = transaction.connection.scalar(
            select(logs.c.id).where(logs.c.run_id == run_id).order_by(logs.c.id.desc()).limit(1)
        )
        assert last is not None
        touch(transaction, "log", run["experiment_id"], (last - len(fresh) + 1, last))
    return wanted + len(fresh)


def _log_row(run: RowMapping, entry: LogEntry) -> dict[str, Any]:
    return {
        "experiment_id": run["experiment_id"],
        "trial_id": run["trial_id"],
        "run_id": run["id"],
        "rank": entry.rank,
        "stream": entry.stream,
        "level": entry.level,
        "text": entry.text.replace("\0", "\ufffd"),
        "time": entry.time,
    }
