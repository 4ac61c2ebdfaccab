"""Parquet files of neptune-exporter: one row for each parameter and each point of a series."""

import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from zerolab.client.imports import ImportedRun
from zerolab.errors import ConfigError

__all__ = ["locate", "read"]

_FIRST_PART = "_part_0.parquet"
_COLUMNS = {"project_id", "run_id", "attribute_path", "attribute_type", "step", "timestamp"}
_OWN = "sys/"
"""Prefix of what Neptune itself stored."""
_PARAMETERS = {
    "float": "float_value",
    "int": "int_value",
    "string": "string_value",
    "bool": "bool_value",
    "datetime": "datetime_value",
    "string_set": "string_set_value",
}
"""Columns of the values of parameters, by type."""


class Location(NamedTuple):
    """Run of an export."""

    directory: Path
    stem: str
    """Start of the names of its files."""


def locate(path: Path) -> list[Location]:
    """Return the runs below a path.

    Raises:
        ConfigError: If there are Parquet files and pyarrow is not installed.
    """
    files = [path] if path.is_file() else sorted(path.rglob(f"*{_FIRST_PART}"))
    return [
        Location(file.parent, file.name.removesuffix(_FIRST_PART))
        for file in files
        if file.name.endswith(_FIRST_PART) and set(_parquet().read_schema(file).names) >= _COLUMNS
    ]


def read(location: Location, _root: Path) -> ImportedRun:
    """Read a run: parameters, float series, name and tags."""
    run: ImportedRun | None = None
    series: dict[str, list[tuple[Decimal, float, float]]] = {}
    for row in _rows(location):
        if run is None:
            project, run_id = str(row["project_id"]), str(row["run_id"])
            run = ImportedRun("neptune", f"{project}\0{run_id}", run_id)
            run.labels = [project]
        path, kind = str(row["attribute_path"]), str(row["attribute_type"])
        if kind == "float_series":
            time = row["timestamp"]
            point = (row["step"], row["float_value"], 0.0 if time is None else time.timestamp())
            series.setdefault(path, []).append(point)
        elif kind not in _PARAMETERS:
            run.omitted[f"values of type {kind}"] += 1
        else:
            _add_parameter(run, path, row[_PARAMETERS[kind]])
    if run is None:
        raise ConfigError("zerolab import", [f"{location.directory / location.stem}: has no rows"])
    for path, points in series.items():
        _add_series(run, path, points)
    return run


def _add_parameter(run: ImportedRun, path: str, value: Any) -> None:
    if path == "sys/name" and value:
        run.name = str(value)
    elif path == "sys/description" and value:
        run.description = str(value)
    elif path in {"sys/tags", "sys/group_tags"}:
        run.labels += [tag for tag in value or () if tag not in run.labels]
    elif path == "sys/creation_time" and value is not None:
        run.created_at = value.timestamp()
    elif not path.startswith(_OWN):
        is_plain = isinstance(value, bool | int | float | str | list) or value is None
        run.hparams[path] = value if is_plain else str(value)


def _add_series(run: ImportedRun, path: str, points: list[tuple[Decimal, float, float]]) -> None:
    points.sort(key=lambda point: point[0])
    whole = all(step == step.to_integral_value() for step, _, _ in points)
    if not whole:
        run.omitted["fractional steps, replaced by 0, 1, 2, ..."] += len(points)
    for number, (step, value, time) in enumerate(points):
        run.add(path, int(step) if whole else number, math.nan if value is None else value, time)


def _rows(location: Location) -> Iterator[dict[str, Any]]:
    """Yield the rows of all parts of a run, a batch at a time."""
    number = 0
    while (part := location.directory / f"{location.stem}_part_{number}.parquet").is_file():
        with _parquet().ParquetFile(part) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
        number += 1


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        problem = "needs pyarrow to read Parquet files; pip install pyarrow"
        raise ConfigError("zerolab import", [problem]) from None
    return pyarrow.parquet
