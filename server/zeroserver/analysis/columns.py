"""Trials of an experiment as columns: hyperparameters, state and metrics.

A column is one of :data:`COLUMNS`, a hyperparameter or a metric. A hyperparameter is
``hparams.NAME``, where NAME is the dotted path of a leaf: ``hparams.optimizer.lr``,
``hparams.layers.0.width``. Its value is None for trials without the leaf. A metric is
``last.GROUP.NAME``, ``min.GROUP.NAME`` or ``max.GROUP.NAME``, as in ``max.validation.accuracy``.
Its value is None if it is NaN or was not reported.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from zerolab.contract.flatten import Leaf
from zerolab.contract.flatten import flatten_hparams as flatten_hparams
from zerolab.contract.messages import wire_number
from zerolab.errors import ConfigError
from zeroserver.analysis.cost import slot_seconds_in
from zeroserver.analysis.missing_result import TrialResult, has_result
from zeroserver.store.database import raw_rows
from zeroserver.store.points import SHIFTS

__all__ = [
    "COLUMNS",
    "COMPUTED",
    "METRICS",
    "PREFIX",
    "Row",
    "Value",
    "best_trial_metric",
    "cell_reader",
    "check_column",
    "decode_hparams",
    "is_column",
    "names",
    "no_metric",
    "raise_problems",
    "read_columns",
    "read_rows",
    "to_json_value",
]

COLUMNS = (
    "id", "state", "best_validation", "latest_validation", "best_steps", "steps_completed",
    "progress", "restarts", "slot_seconds", "activity", "result", "archived",
)  # fmt: skip
PREFIX = "hparams."

METRICS = {
    "last": "(SELECT value FROM points p WHERE p.trial_id = t.id AND p.key_id = ? "
    "ORDER BY step DESC LIMIT 1)",
    "min": "(SELECT min(least) FROM rollups r WHERE r.trial_id = t.id AND r.shift = {top} "
    "AND r.key_id = ?)",
    "max": "(SELECT max(most) FROM rollups r WHERE r.trial_id = t.id AND r.shift = {top} "
    "AND r.key_id = ?)",
}
"""SQL expression of a metric's column, by the first part of the column's name."""

Value = Leaf
"""Value of a cell."""

COMPUTED = frozenset({"slot_seconds", "result"})
"""Columns that are computed, not stored."""
_STORED = tuple(name for name in COLUMNS if name not in COMPUTED)


class Row(NamedTuple):
    """Values of one trial."""

    values: Mapping[str, Value]
    """Values by the names of :data:`COLUMNS` and metrics."""
    hparams: Mapping[str, Value]
    """Hyperparameters by their dotted names."""


def cell_reader(column: str) -> Callable[[Row], Value]:
    """Return a function that reads a column's value from a row, for use with many rows."""
    if column.startswith(PREFIX):
        name = column.removeprefix(PREFIX)
        return lambda row: row.hparams.get(name)
    return lambda row: row.values[column]


def read_rows(
    connection: Connection,
    experiment_id: int,
    now: float | None = None,
    requested: Collection[str] = COLUMNS,
    leaves: Mapping[int, Mapping[str, Value]] | None = None,
) -> list[Row]:
    """Read all trials of an experiment, oldest first, by two queries and two for each metric.

    Args:
        connection: Database connection.
        experiment_id: Id of the experiment.
        now: Assumed end of open runs, in seconds since 1970.
        requested: Columns to read, in addition to the id and the hyperparameters.
        leaves: Known hyperparameters by trial; missing ones are read.
    """
    known_hparams = leaves or {}
    needed = {"id", *requested} & set(_STORED)
    if "result" in requested:
        needed |= {*TrialResult._fields}
    names = sorted(needed)
    query = (
        f"SELECT id, {', '.join(names)} FROM trials "  # noqa: S608 - our own names
        "WHERE experiment_id = ? ORDER BY id"
    )
    costs: Mapping[int, float] = {}
    metric = _searcher_metric(connection, experiment_id) if "result" in requested else ""
    if "slot_seconds" in requested:
        costs = slot_seconds_in(connection, experiment_id, now or time.time())
    measures = {
        column: measured
        for column in requested
        if (measured := _measured(connection, experiment_id, column)) is not None
    }
    result = []
    has_computed = bool(measures) or not COMPUTED.isdisjoint(requested)
    rows = raw_rows(connection, query, (experiment_id,))
    missing: Mapping[int, Mapping[str, Value]] = {}
    if any(row[0] not in known_hparams for row in rows):
        read = raw_rows(connection, _HPARAMS, (experiment_id,))
        missing = {
            number: decode_hparams(text) for number, text in read if number not in known_hparams
        }
    for trial_id, *cells in rows:
        values: dict[str, Value] = dict(zip(names, cells, strict=True))
        result.append(
            Row(values, known_hparams[trial_id] if trial_id in known_hparams else missing[trial_id])
        )
        if not has_computed:
            continue
        for column, measured in measures.items():
            values[column] = measured.get(trial_id)
        if "slot_seconds" in requested:
            values["slot_seconds"] = costs.get(trial_id, 0.0)
        if "result" in requested:
            values["result"] = has_result(
                TrialResult(*(values[name] for name in TrialResult._fields)),  # type: ignore[arg-type]
                metric,
            )
    return result


def _searcher_metric(connection: Connection, experiment_id: int) -> str:
    query = "SELECT metric FROM experiments WHERE id = ?"
    return next((name for (name,) in raw_rows(connection, query, (experiment_id,))), "")


def _measured(
    connection: Connection, experiment_id: int, column: str
) -> dict[int, float | None] | None:
    """Return a metric of each trial; None if the metric was never reported."""
    return _metric(
        connection, column, "SELECT id, {} FROM trials t WHERE experiment_id = ?", (experiment_id,)
    )


def best_trial_metric(connection: Connection, column: str) -> dict[int, float | None] | None:
    """Return a metric of each experiment's best trial, or of its first one if none is best.

    Returns:
        Values by the experiments' ids; None if the metric was never reported.
    """
    return _metric(connection, column, _BEST_TRIALS, ())


_BEST_TRIALS = (
    "SELECT e.id, {} FROM experiments e JOIN trials t ON t.id = coalesce(e.best_trial_id, "
    "(SELECT min(id) FROM trials first WHERE first.experiment_id = e.id))"
)


def _metric(
    connection: Connection, column: str, query: str, values: tuple[int, ...]
) -> dict[int, float | None] | None:
    """Read a metric of the trials ``t`` in a query; keys are the query's first column."""
    aggregate, _, metric = column.partition(".")
    group, _, name = metric.partition(".")
    if aggregate not in METRICS or "\0" in column:
        return None
    keys = raw_rows(
        connection, "SELECT id FROM metric_keys WHERE group_name = ? AND name = ?", (group, name)
    )
    if not keys:
        return None
    value = METRICS[aggregate].format(top=SHIFTS[-1])
    return dict(raw_rows(connection, query.format(value), (keys[0][0], *values)))


def read_columns(
    connection: Connection, experiment_id: int, now: float, requested: Sequence[str]
) -> dict[str, list[Value]] | None:
    """Read the ids and columns other than hyperparameters of all trials of an experiment.

    Args:
        connection: Database connection.
        experiment_id: Id of the experiment.
        now: Assumed end of open runs, in seconds since 1970.
        requested: Names of :data:`COLUMNS` or metrics.

    Returns:
        Values by column; None if a name is unknown.
    """
    needed = {"id", *requested} & set(_STORED)
    if "result" in requested:
        needed |= {*TrialResult._fields}
    names = sorted(needed)
    query = f"SELECT {', '.join(names)} FROM trials WHERE experiment_id = ? ORDER BY id"  # noqa: S608
    rows = raw_rows(connection, query, (experiment_id,))
    read = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}
    result: dict[str, list[Value]] = {name: read.get(name, []) for name in names}
    ids: list[int] = read.get("id", [])
    for column in requested:
        if column == "slot_seconds":
            costs = slot_seconds_in(connection, experiment_id, now) if rows else {}
            result[column] = [costs.get(item, 0.0) for item in ids]
        elif column == "result":
            fields = [result[name] for name in TrialResult._fields]
            metric = _searcher_metric(connection, experiment_id)
            result[column] = [
                has_result(TrialResult(*item), metric) for item in zip(*fields, strict=True)
            ]
        elif column not in result:
            measured = _measured(connection, experiment_id, column)
            if measured is None:
                return None
            result[column] = [measured.get(item) for item in ids]
    return {name: result[name] for name in dict.fromkeys(("id", *requested))}


def to_json_value(value: Value) -> Value:
    """Convert a value for JSON: infinities and NaN become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return wire_number(value)
    return value


_HPARAMS = "SELECT id, hparams FROM trials WHERE experiment_id = ?"


def decode_hparams(text: str) -> Mapping[str, Value]:
    """Decode stored hyperparameters into their leaves."""
    return flatten_hparams(msgspec.json.decode(text))


def names(rows: Sequence[Row]) -> list[str]:
    """Return the names of all hyperparameters, in the order of their first occurrence."""
    return list(dict.fromkeys(name for row in rows for name in row.hparams))


def is_column(column: str, rows: Iterable[Row]) -> bool:
    """Check whether a column exists; a hyperparameter or a metric exists if any trial has it."""
    if column.partition(".")[0] in METRICS:
        return any(column in row.values for row in rows)
    if not column.startswith(PREFIX):
        return column in COLUMNS
    name = column.removeprefix(PREFIX)
    return any(name in row.hparams for row in rows)


def check_column(column: str, known_hparams: Iterable[str], what: str) -> str | None:
    """Return the problem with the name of a column; None if it exists.

    Args:
        column: Name of the column.
        known_hparams: Names of the existing hyperparameters.
        what: Request parameter that named it.
    """
    valid = [*COLUMNS, *(PREFIX + name for name in known_hparams)]
    if column in valid:
        return None
    if column.partition(".")[0] in METRICS:
        return no_metric(column, what)
    import difflib  # startup does not need it

    ending = f".{column.removeprefix(PREFIX)}"
    close = [name for name in valid if name.endswith(ending)]
    close = close or difflib.get_close_matches(column, valid, 1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(valid)}"
    return f"{what}: must be a column, got {column[:200]!r}{hint}"[:2000]


def no_metric(column: str, what: str) -> str:
    """Return the message for an unknown metric, named by the request parameter ``what``."""
    form = "last, min or max, a group and a name, as in max.validation.accuracy"
    return f"{what}: must be a metric that was reported ({form}), got {column[:200]!r}"


def raise_problems(problems: Sequence[str | None]) -> None:
    """Raise if there is any problem with a request.

    Raises:
        ConfigError: Lists all problems.
    """
    actual = [problem for problem in problems if problem is not None]
    if actual:
        raise ConfigError("request", actual)
