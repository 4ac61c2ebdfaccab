"""Import of an offline run as an ended experiment with one trial."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import delete

from zerolab.contract.messages import MetricsRecord, Record
from zerolab.contract.names import printable
from zerolab.contract.secrets import mask_secrets
from zerolab.errors import ConfigError
from zerolab.reports.metrics_file import FORMAT, MetricsHeader
from zeroserver.errors import StoreError
from zeroserver.orchestrator.ingest.report_service import best_of
from zeroserver.orchestrator.ingest.values import PointReader, check_times
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.states import ExperimentState, TrialState
from zeroserver.store.orphans import forget_points
from zeroserver.store.points import store_points
from zeroserver.store.schema import experiments, trials

__all__ = ["MetricsLog", "import_run", "parse"]

_CHUNK = 4_000
"""Values that one job of the writer stores."""

Write = Callable[[Callable[[UnitOfWork], Any]], Awaitable[Any]]


class _Rows(NamedTuple):
    """Columns of the experiment and of its trial, without ids."""

    experiment: dict[str, Any]
    trial: dict[str, Any]


class MetricsLog(msgspec.Struct, frozen=True):
    """The content of a metrics file."""

    header: MetricsHeader
    records: list[Record]


def parse(content: bytes) -> MetricsLog:
    """Read a metrics file: a header, then one record a line.

    A last line that was cut, since its writer died, is left out.

    Raises:
        ConfigError: If it is not a metrics file.
    """
    return MetricsLog(_header(content), list(_records(content)))


def _header(content: bytes) -> MetricsHeader:
    first = content.partition(b"\n")[0]
    try:
        header = msgspec.json.decode(first, type=MetricsHeader)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        problem = f"line 1: must be the header of a metrics file ({error})"
        raise ConfigError("metrics file", [problem]) from None
    if header.format != FORMAT:
        problem = f"format: must be {FORMAT}, got {header.format}; use the version that wrote it"
        raise ConfigError("metrics file", [problem])
    check_times([header.time])
    return header


def _records(content: bytes) -> Iterator[Record]:
    decoder = msgspec.json.Decoder(Record)
    lines = content.split(b"\n")
    for number, line in enumerate(lines[1:-1], start=2):  # behind the last \n: nothing, or a cut
        try:
            record = decoder.decode(line)
            check_times([record.time])
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise ConfigError("metrics file", [f"line {number}: {error}"]) from None
        except ConfigError as error:
            raise ConfigError("metrics file", [f"line {number}: {error.problems[0]}"]) from None
        yield record


async def import_run(write: Write, log: MetricsLog) -> int:
    """Store a run's metrics as an experiment of their own; return its id.

    The points are stored a few thousand at a time, so that others get their turn in between. They
    belong to a trial that nobody sees before all are there.

    Args:
        write: Runs a job of the orchestrator and waits for its commit.
        log: What to store.

    Raises:
        ConfigError: If a record holds what cannot be stored; then nothing is.
    """
    rows = await asyncio.to_thread(_rows, log)
    ids: tuple[int, int] = await write(partial(_reserve, rows=rows))
    experiment_id, trial_id = ids
    try:
        for chunk in _chunks(log):
            await write(partial(_store, trial_id=trial_id, chunk=chunk))
        await write(partial(_publish, rows=rows, ids=ids))
    except BaseException:
        with suppress(StoreError):  # the next start of the server does it then
            await write(partial(_forget, trial_id=trial_id))
        raise
    return experiment_id


def _chunks(log: MetricsLog) -> Iterator[list[MetricsRecord]]:
    chunk: list[MetricsRecord] = []
    values = 0
    for record in log.records:
        if isinstance(record, MetricsRecord):
            chunk.append(record)
            values += len(record.values)
        if values >= _CHUNK:
            yield chunk
            chunk, values = [], 0
    yield chunk


def _reserve(work: UnitOfWork, rows: _Rows) -> tuple[int, int]:
    """Take ids that no experiment and no trial will have besides."""
    connection = work.connection
    insert = experiments.insert().values(rows.experiment).returning(experiments.c.id)
    experiment_id = int(connection.execute(insert).scalar_one())
    row = {**rows.trial, "experiment_id": experiment_id}
    insert = trials.insert().values(row).returning(trials.c.id)
    trial_id = int(connection.execute(insert).scalar_one())
    connection.execute(delete(trials).where(trials.c.id == trial_id))
    connection.execute(delete(experiments).where(experiments.c.id == experiment_id))
    work.orchestrator.deletions.importing.add(trial_id)
    work.undo.append(lambda: work.orchestrator.deletions.importing.discard(trial_id))
    return experiment_id, trial_id


def _store(work: UnitOfWork, trial_id: int, chunk: list[MetricsRecord]) -> None:
    points = PointReader(work.metric_names, trial_id)
    new = [point for record in chunk for point in points.read(record)]
    store_points(work, trial_id, new)


def _publish(work: UnitOfWork, rows: _Rows, ids: tuple[int, int]) -> None:
    experiment_id, trial_id = ids
    best = trial_id if rows.experiment.get("best_validation") is not None else None
    experiment = {**rows.experiment, "id": experiment_id, "best_trial_id": best}
    work.connection.execute(experiments.insert().values(experiment))
    trial = {**rows.trial, "id": trial_id, "experiment_id": experiment_id}
    work.connection.execute(trials.insert().values(trial))
    work.then.append(lambda: work.orchestrator.deletions.importing.discard(trial_id))
    work.touch("experiment", experiment_id, experiment_id)


def _forget(work: UnitOfWork, trial_id: int) -> None:
    forget_points(work, trial_id)
    work.then.append(lambda: work.orchestrator.deletions.importing.discard(trial_id))


def _rows(log: MetricsLog) -> _Rows:
    """Make the experiment and the trial, with all that the records come to."""
    config: Mapping[str, Any] = log.header.config
    metrics = [record for record in log.records if isinstance(record, MetricsRecord)]
    block = config.get("searcher")
    searcher: Mapping[str, Any] = block if isinstance(block, Mapping) else {}
    last = max((record.time for record in log.records), default=log.header.time)
    times = {"created_at": log.header.time, "started_at": log.header.time, "ended_at": last}
    text = msgspec.json.encode(mask_secrets(config)).decode()
    experiment = {
        "name": printable(str(config.get("name") or "imported"))[:255],
        "state": ExperimentState.COMPLETED,
        "config": text,
        "raw_config": text,
        "searcher_name": "single",
        "metric": printable(str(searcher.get("metric") or _usual_metric(metrics))),
        "smaller_is_better": int(bool(searcher.get("smaller_is_better", True))),
        "seed": log.header.trial_seed,
        "slots": 1,
        "priority": 42,
        "searcher_done": 1,
        "progress": 1.0,
        "num_trials": 1,
        **times,
    }
    trial = {
        "request_id": 1,
        "state": TrialState.COMPLETED,
        "hparams": msgspec.json.encode(log.header.hparams).decode(),
        "seed": log.header.trial_seed,
        "progress": 1.0,
        **times,
    }
    return _summarise(_Rows(experiment, trial), metrics)


def _usual_metric(metrics: Sequence[MetricsRecord]) -> str:
    """Return ``loss`` where a validation has it, else nothing."""
    has_loss = any(record.group == "validation" and "loss" in record.values for record in metrics)
    return "loss" if has_loss else ""


def _summarise(rows: _Rows, metrics: list[MetricsRecord]) -> _Rows:
    steps = max((record.steps for record in metrics if record.group != "system"), default=0)
    values: dict[str, Any] = {"steps_completed": steps}
    metric: str = rows.experiment["metric"]
    best: tuple[float, int] | None = None
    for record in metrics:
        if record.group == "validation" and metric in record.values:
            value, best = best_of(metric, rows.experiment["smaller_is_better"], record, best)
            values["latest_validation"] = value
    if best is None:
        return _Rows(rows.experiment, rows.trial | values)
    values |= {"best_validation": best[0], "best_steps": best[1]}
    return _Rows(rows.experiment | {"best_validation": best[0]}, rows.trial | values)
