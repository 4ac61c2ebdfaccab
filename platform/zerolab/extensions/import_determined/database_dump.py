"""Dump of the PostgreSQL database of Determined's master, in the plain format of ``pg_dump``.

The file has a ``COPY`` block for each table, with a line for each row. Each trial becomes a run.
The first pass reads experiments and trials, and notes where the metrics of each trial are, so that
a dump may be larger than the memory.
"""

import json
import math
import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from zerolab.client.imports import ImportedRun
from zerolab.errors import ConfigError

__all__ = ["locate", "read"]

_MAGIC = b"-- PostgreSQL database dump"
_CUSTOM_MAGIC = b"PGDMP"
_HEAD_BYTES = 4096
_COPY = re.compile(rb'COPY (?:[\w"]+\.)?"?(\w+)"? \((.*)\) FROM stdin;')
_END = b"\\."
_EXPERIMENTS, _TRIALS = "experiments", ("trials", "runs")
"""The table of trials is named ``runs`` since Determined 0.34; ``trials`` is a view then."""
_METRICS = {
    "raw_steps": "training",
    "raw_validations": "validation",
    "generic_metrics": None,  # each row names its group
    "steps": "training",
    "validations": "validation",
}
"""Groups of the tables of metrics."""
_VALUES = ("avg_metrics", "validation_metrics")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_UNESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)

Row = dict[str, str | None]


class _Block(NamedTuple):
    """Rows of a table."""

    start: int
    """Offset of the first row in the file."""
    table: str
    columns: list[str]


class Dump:
    """Experiments and trials of a dump, and the offsets of their metrics.

    Args:
        file: The dump.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.experiments: dict[int, Row] = {}
        self.trials: dict[int, Row] = {}
        self.offsets: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        self._blocks: list[_Block] = []
        block: _Block | None = None
        position = 0
        with file.open("rb") as lines:
            for line in lines:
                if block is None:
                    block = self._begin(line, position + len(line))
                elif line.rstrip() == _END:
                    block = None
                else:
                    self._index(block, line, position)
                position += len(line)

    def _begin(self, line: bytes, start: int) -> _Block | None:
        """Return the block whose ``COPY`` statement is on this line."""
        match = _COPY.match(line) if line.startswith(b"COPY ") else None
        if match is None:
            return None
        columns = [name.strip().strip('"') for name in match[2].decode().split(",")]
        block = _Block(start, match[1].decode(), columns)
        self._blocks.append(block)
        return block

    def _index(self, block: _Block, line: bytes, position: int) -> None:
        if block.table in _METRICS and "trial_id" in block.columns:
            trial_id = line.split(b"\t")[block.columns.index("trial_id")]
            self.offsets[int(trial_id)].append(position)
        elif block.table == _EXPERIMENTS or block.table in _TRIALS:
            row = _row(block, line)
            rows = self.experiments if block.table == _EXPERIMENTS else self.trials
            rows[int(row["id"] or 0)] = row

    def metrics(self, trial_id: int) -> Iterator[tuple[str | None, Row]]:
        """Yield group and row of each report of a trial; the group is None if the row names it."""
        starts = [block.start for block in self._blocks]
        with self.file.open("rb") as lines:
            for offset in self.offsets[trial_id]:
                block = self._blocks[bisect_right(starts, offset) - 1]
                lines.seek(offset)
                yield _METRICS[block.table], _row(block, lines.readline())


class Location(NamedTuple):
    """Trial of a dump."""

    dump: Dump
    trial_id: int


def locate(path: Path) -> list[Location]:
    """Return the trials in the dumps below a path.

    Raises:
        ConfigError: If a dump has another format than plain text.
    """
    files = [path] if path.is_file() else sorted([*path.rglob("*.sql"), *path.rglob("*.dump")])
    locations = []
    for file in files:
        with file.open("rb") as content:
            head = content.read(_HEAD_BYTES)
        if head.startswith(_CUSTOM_MAGIC):
            problem = f"{file}: must be a dump as text; make it with `pg_dump --format=plain`"
            raise ConfigError("zerolab import", [problem])
        if _MAGIC in head:
            dump = Dump(file)
            ids = (number for number, row in dump.trials.items() if "experiment_id" in row)
            locations += [Location(dump, number) for number in sorted(ids)]
    return locations


def read(location: Location, _root: Path) -> ImportedRun:
    """Read a trial with the name, labels and description of its experiment.

    Raises:
        ConfigError: If a row is damaged.
    """
    dump, trial_id = location
    trial = dump.trials[trial_id]
    experiment_id = int(trial["experiment_id"] or 0)
    experiment = dump.experiments.get(experiment_id, {})
    try:
        config = json.loads(experiment.get("config") or "{}")
        created = _time(trial.get("start_time") or experiment.get("start_time"))
        name = f"{config.get('name') or f'experiment {experiment_id}'} trial {trial_id}"
        identity = f"{experiment_id} {trial_id} {trial.get('start_time')}"
        run = ImportedRun("determined", identity, name, created)
        run.hparams = json.loads(trial.get("hparams") or "{}")
        labels = config.get("labels")
        run.labels = [f"determined-{experiment_id}", *(labels if isinstance(labels, list) else [])]
        notes = experiment.get("notes") or config.get("description") or ""
        state = trial.get("state") or ""
        run.description = f"{notes}\n\nDetermined trial {trial_id}, {state}".strip()
        for group, row in dump.metrics(trial_id):
            _add(run, group, row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{dump.file}: trial {trial_id}: must have the rows of Determined, got {error}"
        raise ConfigError("zerolab import", [problem]) from None
    return run


def _add(run: ImportedRun, group: str | None, row: Row) -> None:
    if row.get("archived") == "t":
        run.omitted["reports that a restart repeated"] += 1
        return
    content = json.loads(row["metrics"] or "{}")
    values = next((content[key] for key in _VALUES if content.get(key)), None)
    group = group or row.get("metric_group") or "training"
    step, time = int(row.get("total_batches") or 0), _time(row.get("end_time"))
    for name, value in (values or {}).items():
        number = _NOT_FINITE.get(value) if isinstance(value, str) else value
        if isinstance(number, int | float):
            run.add(f"{group}/{name}", step, float(number), time or 0.0)
        else:
            run.omitted[f"values of type {type(value).__name__}"] += 1


def _time(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


def _row(block: _Block, line: bytes) -> Row:
    cells = line.decode("utf-8").rstrip("\r\n").split("\t")
    return dict(zip(block.columns, map(_cell, cells), strict=False))


def _cell(text: str) -> str | None:
    if text == r"\N":
        return None
    return _ESCAPE.sub(lambda match: _UNESCAPED.get(match[1], match[1]), text)
