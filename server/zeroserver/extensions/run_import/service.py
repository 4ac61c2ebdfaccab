"""Import of an offline run as an ended experiment with one trial."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import delete

from zerolab.contract.limits import LABEL_CHARACTERS, LABELS
from zerolab.contract.media import MediaRecord, media_problem
from zerolab.contract.messages import MetricsRecord, Record
from zerolab.contract.names import printable
from zerolab.contract.secrets import mask_secrets
from zerolab.errors import ConfigError
from zerolab.reports.metrics_file import FORMAT, MetricsHeader
from zeroserver.errors import StoreError
from zeroserver.orchestrator.ingest.media_service import MediaService
from zeroserver.orchestrator.ingest.metric_names import MetricNameService
from zeroserver.orchestrator.ingest.report_service import best_of
from zeroserver.orchestrator.ingest.values import PointReader, check_times
from zeroserver.orchestrator.orphans import OrphanService
from zeroserver.orchestrator.service import DomainTransaction, Service, Uses
from zeroserver.states import ExperimentState, TrialState
from zeroserver.store.points import store_points
from zeroserver.store.project_directory import open_project
from zeroserver.store.schema import experiments, trials

__all__ = ["MetricsLog", "import_run", "parse"]

_DESCRIPTION = 10_000
"""Maximum number of characters of a description."""
_CHUNK = 4_000
"""Number of values that one transaction stores."""
_MEDIA = 500
"""Number of media records that one transaction stores."""

Write = Callable[[Callable[[DomainTransaction], Any]], Awaitable[Any]]


class _Rows(NamedTuple):
    """Columns of the experiment and its trial, without ids."""

    experiment: dict[str, Any]
    trial: dict[str, Any]
    project: str | None


class SeriesRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="series"):
    """Points of one metric, shorter than a record per point."""

    group: str
    name: str
    steps: list[int]
    values: list[float | str]
    times: list[float]


class MetricsLog(msgspec.Struct, frozen=True):
    """Content of a metrics file."""

    header: MetricsHeader
    records: list[Record | SeriesRecord]

    def metrics(self) -> Iterator[MetricsRecord]:
        """Yield the metrics; a series is divided into records of one point."""
        for record in self.records:
            if isinstance(record, MetricsRecord):
                yield record
            elif isinstance(record, SeriesRecord):
                for step, value, time in zip(
                    record.steps, record.values, record.times, strict=True
                ):
                    yield MetricsRecord(record.group, step, {record.name: value}, time)

    def media(self) -> list[MediaRecord]:
        """Return the records of media."""
        return [record for record in self.records if isinstance(record, MediaRecord)]


def parse(content: bytes) -> MetricsLog:
    """Parse a metrics file: a header, then one record per line.

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


def _records(content: bytes) -> Iterator[Record | SeriesRecord]:
    decoder = msgspec.json.Decoder(Record | SeriesRecord)
    lines = content.split(b"\n")
    for number, line in enumerate(
        lines[1:-1], start=2
    ):  # after the last \n: nothing, or a truncated
        try:
            record = decoder.decode(line)
            if isinstance(record, SeriesRecord):
                _check_series(record)
            else:
                check_times([record.time])
                if isinstance(record, MediaRecord) and (problem := media_problem(record)):
                    raise ConfigError("media", [problem])
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise ConfigError("metrics file", [f"line {number}: {error}"]) from None
        except ConfigError as error:
            raise ConfigError("metrics file", [f"line {number}: {error.problems[0]}"]) from None
        yield record


def _check_series(record: SeriesRecord) -> None:
    lengths = {len(record.steps), len(record.values), len(record.times)}
    if len(lengths) > 1:
        problem = f"steps, values, times: must have one length, got {sorted(lengths)}"
        raise ConfigError("series", [problem])
    check_times(record.times)


async def import_run(
    write: Write, log: MetricsLog, owner_id: int, project: str | None = None
) -> int:
    """Store a run's metrics as a new experiment; return its id.

    The points are stored a few thousand at a time, so that others get their turn in between. They
    belong to a trial that nobody sees before all are there.

    Args:
        write: Function that runs a job of the orchestrator and waits for its commit.
        log: Content of the metrics file.
        owner_id: User who imports it.
        project: Its project; None for that of its configuration.

    Raises:
        ConfigError: If a record has an invalid value, or there is no such project; nothing is
            stored then.
        ConflictError: If the project is archived.
    """
    rows = await asyncio.to_thread(_rows, log, owner_id)
    if project is not None:
        rows = rows._replace(project=project)
    ids: tuple[int, int] = await write(lambda work: RunImport(work).reserve(rows))
    experiment_id, trial_id = ids
    try:
        for chunk in _chunks(log):

            def store(work: DomainTransaction, chunk: list[MetricsRecord] = chunk) -> None:
                RunImport(work).store(trial_id, chunk)

            await write(store)
        media = log.media()
        for first in range(0, len(media), _MEDIA):
            records = media[first : first + _MEDIA]
            await write(partial(_store_media, trial_id=trial_id, records=records))
        await write(lambda work: RunImport(work).publish(rows, experiment_id, trial_id))
    except BaseException:
        with suppress(StoreError):  # the next start of the server deletes them
            await write(lambda work: RunImport(work).forget(trial_id))
        raise
    return experiment_id


def _store_media(work: DomainTransaction, trial_id: int, records: Sequence[MediaRecord]) -> None:
    RunImport(work).media.store(trial_id, records)


def _chunks(log: MetricsLog) -> Iterator[list[MetricsRecord]]:
    chunk: list[MetricsRecord] = []
    values = 0
    for record in log.metrics():
        chunk.append(record)
        values += len(record.values)
        if values >= _CHUNK:
            yield chunk
            chunk, values = [], 0
    yield chunk


class RunImport(Service):
    """Stores the parts of one import."""

    metric_names = Uses(MetricNameService)
    media = Uses(MediaService)
    orphans = Uses(OrphanService)

    def reserve(self, rows: _Rows) -> tuple[int, int]:
        """Reserve unused ids of an experiment and a trial."""
        connection = self.work.connection
        open_project(connection, rows.project, hidden=self.work.hidden)
        insert = experiments.insert().values(rows.experiment).returning(experiments.c.id)
        experiment_id = int(connection.execute(insert).scalar_one())
        row = {**rows.trial, "experiment_id": experiment_id}
        insert = trials.insert().values(row).returning(trials.c.id)
        trial_id = int(connection.execute(insert).scalar_one())
        connection.execute(delete(trials).where(trials.c.id == trial_id))
        connection.execute(delete(experiments).where(experiments.c.id == experiment_id))
        self._importing.add(trial_id)
        self.work.undo.append(lambda: self._importing.discard(trial_id))
        return experiment_id, trial_id

    @property
    def _importing(self) -> set[int]:
        return self.work.orchestrator.deletions.importing

    def store(self, trial_id: int, chunk: list[MetricsRecord]) -> None:
        """Store the points of some records."""
        points = PointReader(self.metric_names, trial_id)
        new = [point for record in chunk for point in points.read(record)]
        store_points(self.work, trial_id, new)

    def publish(self, rows: _Rows, experiment_id: int, trial_id: int) -> None:
        """Store the experiment and its trial, after all points."""
        best = None if rows.experiment["best_validation"] is None else trial_id
        experiment = {**rows.experiment, "id": experiment_id, "best_trial_id": best}
        experiment["project_id"] = open_project(
            self.work.connection, rows.project, hidden=self.work.hidden
        )
        self.work.connection.execute(experiments.insert().values(experiment))
        trial = {**rows.trial, "id": trial_id, "experiment_id": experiment_id}
        self.work.connection.execute(trials.insert().values(trial))
        self.work.then.append(lambda: self._importing.discard(trial_id))
        self.work.touch("experiment", experiment_id, experiment_id)

    def forget(self, trial_id: int) -> None:
        """Delete the points and the index of media of a failed import."""
        self.orphans.forget_points(trial_id)
        self.media.forget_after(trial_id, -1)
        self.work.then.append(lambda: self._importing.discard(trial_id))


def _rows(log: MetricsLog, owner_id: int) -> _Rows:
    """Return the columns of the experiment and its trial, aggregated from the records."""
    config: Mapping[str, Any] = log.header.config
    last, steps, has_loss = log.header.time, 0, False
    for record in log.metrics():
        last = max(last, record.time)
        if record.group != "system":
            steps = max(steps, record.steps)
        if record.group == "validation" and "loss" in record.values:
            has_loss = True
    block = config.get("searcher")
    searcher: Mapping[str, Any] = block if isinstance(block, Mapping) else {}
    metric = printable(str(searcher.get("metric") or ("loss" if has_loss else "")))
    smaller_is_better = int(bool(searcher.get("smaller_is_better", True)))
    latest: float | None = None
    best: tuple[float, int] | None = None
    for record in log.metrics() if metric else ():
        if record.group == "validation" and metric in record.values:
            latest, best = best_of(metric, smaller_is_better, record, best)
    best_validation, best_steps = best or (None, None)
    times = {"created_at": log.header.time, "started_at": log.header.time, "ended_at": last}
    text = msgspec.json.encode(mask_secrets(config)).decode()
    experiment = {
        "name": printable(str(config.get("name") or "imported"))[:255],
        "description": printable(str(config.get("description") or ""))[:_DESCRIPTION],
        "labels": msgspec.json.encode(_labels(config)).decode(),
        "state": ExperimentState.COMPLETED,
        "config": text,
        "raw_config": text,
        "searcher_name": "single",
        "metric": metric,
        "smaller_is_better": smaller_is_better,
        "seed": log.header.trial_seed,
        "owner_id": owner_id,
        "slots": 1,
        "priority": 42,
        "searcher_done": 1,
        "progress": 1.0,
        "num_trials": 1,
        "best_validation": best_validation,
        **times,
    }
    trial = {
        "request_id": 1,
        "state": TrialState.COMPLETED,
        "hparams": msgspec.json.encode(log.header.hparams).decode(),
        "seed": log.header.trial_seed,
        "progress": 1.0,
        "steps_completed": steps,
        "latest_validation": latest,
        "best_validation": best_validation,
        "best_steps": best_steps,
        **times,
    }
    project = config.get("project")
    return _Rows(experiment, trial, project if isinstance(project, str) else None)


def _labels(config: Mapping[str, Any]) -> list[str]:
    labels = config.get("labels")
    texts = [printable(str(label)) for label in labels] if isinstance(labels, list) else []
    return list(dict.fromkeys(text[:LABEL_CHARACTERS] for text in texts if text))[:LABELS]
