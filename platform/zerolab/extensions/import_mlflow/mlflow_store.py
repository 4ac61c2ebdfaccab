"""MLflow stores: a directory, or a SQLite file."""

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

from zerolab.client.imports import ImportedRun
from zerolab.errors import ConfigError

__all__ = ["locate", "read"]

_SQLITE = b"SQLite format 3\0"
_LARGEST = 1.7976931348623157e308
"""SQLite stores of MLflow contain this instead of an infinity."""
_LARGEST_ARTIFACT = 100 * 1024**2
_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
_STATUS = {1: "RUNNING", 2: "SCHEDULED", 3: "FINISHED", 4: "FAILED", 5: "KILLED"}

Point = tuple[str, float, int, int]
"""Name, value, time in milliseconds, and step."""


class Location(NamedTuple):
    """Run of a store."""

    store: Path
    """Directory of the run, or SQLite file."""
    run_id: str
    experiment: str
    """Name of the MLflow experiment."""


def locate(path: Path) -> list[Location]:
    """Return the runs of a store that are not deleted."""
    if path.is_file():
        with path.open("rb") as file:
            return _locate_rows(path) if file.read(len(_SQLITE)) == _SQLITE else []
    locations = []
    for meta_file in sorted(path.rglob("meta.yaml")):
        meta = _read_yaml(meta_file)
        if "run_id" in meta and _is_active(meta):
            experiment_file = meta_file.parent.parent / "meta.yaml"
            experiment = _read_yaml(experiment_file) if experiment_file.is_file() else {}
            name = str(experiment.get("name", ""))
            locations.append(Location(meta_file.parent, str(meta["run_id"]), name))
    return locations


def _is_active(meta: Mapping[str, Any]) -> bool:
    return bool(meta.get("lifecycle_stage", "active") == "active")


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}  # of another program
    return content if isinstance(content, dict) else {}


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)


def _locate_rows(path: Path) -> list[Location]:
    query = (
        "SELECT runs.run_uuid, experiments.name FROM runs LEFT JOIN experiments USING "
        "(experiment_id) WHERE runs.lifecycle_stage = 'active' ORDER BY runs.start_time"
    )
    with closing(_connect(path)) as connection:
        try:
            rows = connection.execute(query).fetchall()
        except sqlite3.OperationalError:
            return []  # another program's database
    return [Location(path, run_id, name or "") for run_id, name in rows]


def read(location: Location, _root: Path) -> ImportedRun:
    """Read a run.

    Raises:
        ConfigError: If a file of the store is damaged.
    """
    of_file = location.store.is_file()
    meta, params, tags, points = (_read_rows if of_file else _read_files)(location)
    name = tags.get("mlflow.runName") or meta.get("run_name") or location.run_id
    start = meta.get("start_time")
    run = ImportedRun("mlflow", location.run_id, str(name), None if start is None else start / 1000)
    run.hparams = {key: _parameter(value) for key, value in params.items()}
    own = {key: value for key, value in tags.items() if not key.startswith("mlflow.")}
    labels = [location.experiment, *(f"{key}={value}" for key, value in own.items())]
    run.labels = [label for label in labels if label]
    status = _STATUS.get(meta.get("status", 0), str(meta.get("status")))
    run.description = tags.get("mlflow.note.content") or f"MLflow run {location.run_id}, {status}"
    for key, value, milliseconds, step in points:
        run.add(key, step, value, milliseconds / 1000)
    _add_artifacts(run, location.run_id, meta, 0.0 if start is None else start / 1000)
    return run


def _add_artifacts(run: ImportedRun, run_id: str, meta: Mapping[str, Any], time: float) -> None:
    """Add the artifacts of a run as images and files, if they are on this machine.

    Only a folder ``RUN_ID/artifacts`` is read, and no links: a store may be from another person.
    """
    from zerolab.extensions.media.encoders import ENCODERS

    uri = urlsplit(str(meta.get("artifact_uri") or ""))
    if uri.scheme not in {"", "file"}:
        run.omitted[f"artifacts in {uri.scheme}://"] += 1
        return
    folder = Path(unquote(uri.path))
    if not uri.path or not folder.is_dir():
        return
    if folder.parts[-2:] != (run_id, "artifacts"):
        run.omitted["artifacts outside of a folder RUN_ID/artifacts"] += 1
        return
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or file.resolve() != folder.resolve() / file.relative_to(folder):
            continue
        if file.stat().st_size > _LARGEST_ARTIFACT:
            run.omitted["artifacts of more than 100 MiB"] += 1
            continue
        name = str(file.relative_to(folder))
        try:
            items = ENCODERS["image" if file.suffix in _IMAGES else "file"](file)
        except ConfigError:  # another file with the suffix of an image
            items = ENCODERS["file"](file)
        run.add_medium(name, 0, items, time)


_Content = tuple[dict[str, Any], dict[str, str], dict[str, str], Iterable[Point]]


def _read_files(location: Location) -> _Content:
    folder = location.store
    points: list[Point] = []
    for name, text in _texts(folder / "metrics").items():
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                time, value, *step = line.split()[:3]
                points.append((name, float(value), int(time), int(step[0]) if step else 0))
            except ValueError:
                problem = f"{folder / 'metrics' / name}: line {number}: must be TIME VALUE STEP"
                raise ConfigError("zerolab import", [f"{problem}, got {line[:100]!r}"]) from None
    params = _texts(folder / "params")
    return _read_yaml(folder / "meta.yaml"), params, _texts(folder / "tags"), points


def _texts(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in files}


def _read_rows(location: Location) -> _Content:
    run = (location.run_id,)
    with closing(_connect(location.store)) as connection:
        row = connection.execute(
            "SELECT name, start_time, status, artifact_uri FROM runs WHERE run_uuid = ?", run
        ).fetchone()
        names = ("run_name", "start_time", "status", "artifact_uri")
        meta = dict(zip(names, row, strict=True))
        params = dict(connection.execute("SELECT key, value FROM params WHERE run_uuid = ?", run))
        tags = dict(connection.execute("SELECT key, value FROM tags WHERE run_uuid = ?", run))
        points = [
            (key, math.nan if is_nan else _with_infinity(value), time, step)
            for key, value, time, step, is_nan in connection.execute(
                "SELECT key, value, timestamp, step, is_nan FROM metrics WHERE run_uuid = ? "
                "ORDER BY key, step, timestamp",
                run,
            )
        ]
    return meta, params, tags, points


def _with_infinity(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) >= _LARGEST else value


def _parameter(text: str) -> Any:
    """Return a number or Boolean that MLflow has stored as a text, or the text."""
    if text in {"True", "False"}:
        return text == "True"
    try:
        value = json.loads(text)
    except ValueError:
        return text
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return value if is_number and not isinstance(value, bool) else text
