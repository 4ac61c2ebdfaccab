"""Files of exported metrics that are made from the server's points: Parquet and TensorBoard."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from zerolab.client.http import Client
from zerolab.client.libraries import library
from zerolab.client.objects.metrics_table import MetricSeries, MetricsTable
from zerolab.contract.flatten import flatten_hparams
from zerolab.errors import ConfigError, ConflictError, NotFoundError

__all__ = ["write_file", "write_parquet", "write_tensorboard"]

_ROW_GROUP = 1_000_000
"""Number of points that are in memory, and in a row group of the file."""


def write_file(pieces: Iterable[bytes], path: Path) -> None:
    """Write the pieces of an export to a file. A partial file is never left behind."""
    with _complete_or_absent(path) as partial, partial.open("wb") as file:
        for piece in pieces:
            file.write(piece)


@contextmanager
def _complete_or_absent(path: Path) -> Iterator[Path]:
    """Yield the path of a partial file, which becomes ``path`` unless there is an error."""
    if path.is_dir():
        raise ConfigError("--output", [f"{path}: must be a file, got a directory"])
    if path.exists() and not path.is_file():  # a pipe or device
        yield path
        return
    partial = path.with_name(f"{path.name}.part")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_parquet(client: Client, experiment_id: int, path: Path) -> int:
    """Write all points of an experiment to a Parquet file; return their number.

    Columns: trial_id, group, name, step, value, time (UTC). A partial file is never left behind.

    Raises:
        ConfigError: If pyarrow is not installed, or the server cannot read some of the points.
    """
    parquet = library("pyarrow.parquet", "parquet")
    schema = MetricsTable([]).to_arrow().schema
    total = 0
    with (
        _complete_or_absent(path) as partial,
        parquet.ParquetWriter(partial, schema, compression="zstd") as writer,
    ):
        for batch in _batches(client.metric_series(experiment_id)):
            table = MetricsTable(batch)
            total += len(table)
            writer.write_table(table.to_arrow())
    return total


def _batches(series: Iterable[MetricSeries]) -> Iterator[list[MetricSeries]]:
    batch: list[MetricSeries] = []
    points = 0
    for part in series:
        batch.append(part)
        points += len(part.steps)
        if points >= _ROW_GROUP:
            yield batch
            batch, points = [], 0
    yield batch


def write_tensorboard(client: Client, experiment_id: int, directory: Path) -> int:
    """Write all points of an experiment as TensorBoard event files; return their number.

    Each trial has a directory ``trial-N`` with scalars ``GROUP/NAME`` and its hyperparameters.

    Raises:
        ConflictError: If a directory of a trial already exists.
        NotFoundError: If the experiment does not exist.
        ConfigError: If the server cannot read some of the points.
    """
    hparams = {trial["id"]: trial["hparams"] for trial in client.trials(experiment_id)}
    if not hparams:
        raise NotFoundError(f"experiment {experiment_id} has no trials")
    existing = [name for number in hparams if (name := directory / f"trial-{number}").exists()]
    if existing:
        raise ConflictError(f"{existing[0]}: must not exist; give another directory")
    total = 0
    by_trial = groupby(client.metric_series(experiment_id), key=lambda part: part.trial_id)
    for trial_id, series in by_trial:
        parts = list(series)
        total += len(MetricsTable(parts))  # raises if points are missing
        _write_events(directory / f"trial-{trial_id}", hparams.get(trial_id, {}), parts)
    return total


def _write_events(
    directory: Path, hparams: Mapping[str, Any], series: Iterable[MetricSeries]
) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams import summary_v2
    from tensorboard.summary.writer.record_writer import RecordWriter

    points: dict[tuple[int, float], list[tuple[str, float]]] = {}
    for part in series:
        tag = f"{part.group}/{part.name}"
        for step, value, when in zip(part.steps, part.values, part.times, strict=True):
            points.setdefault((step, float(when)), []).append((tag, float(value)))
    directory.mkdir(parents=True)
    name = f"events.out.tfevents.{int(time.time())}.zerolab"
    with (directory / name).open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        plain = {key: _hparam(value) for key, value in flatten_hparams(dict(hparams)).items()}
        summary = summary_v2.hparams_pb(plain)
        writer.write(Event(summary=summary).SerializeToString())
        for (step, when), values in sorted(points.items()):
            event = Event(step=step, wall_time=when)
            for tag, value in values:
                event.summary.value.add(tag=tag, simple_value=value)
            writer.write(event.SerializeToString())


def _hparam(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
