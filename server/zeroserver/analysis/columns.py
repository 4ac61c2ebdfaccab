"""The trials of an experiment as columns: what each was started with, and how it did.

A column is one of :data:`COLUMNS`, or ``hparams.NAME``, where NAME is the dotted path of a leaf:
``hparams.optimizer.lr``, ``hparams.layers.0.width``. A leaf that a trial does not have (it exists
only for some values of another one) is None. Or it is a metric, ``last.GROUP.NAME``, ``min.`` or
``max.``: ``max.validation.accuracy``; one that is not reported, or NaN, is None.
"""

import difflib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from zerolab.contract.flatten import Leaf
from zerolab.contract.flatten import flatten_hparams as take_apart
from zerolab.contract.messages import wire_number
from zerolab.errors import ConfigError
from zeroserver.analysis.cost import slot_seconds_in
from zeroserver.analysis.missing_result import has_result
from zeroserver.store.database import raw_rows
from zeroserver.store.points import SHIFTS

__all__ = [
    "COLUMNS",
    "MADE",
    "METRICS",
    "PREFIX",
    "Row",
    "Value",
    "cell_of",
    "check_column",
    "is_column",
    "leaves_of",
    "measured_of_best",
    "names",
    "no_metric",
    "on_wire",
    "read_columns",
    "read_rows",
    "refuse",
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
"""What a metric's column tells, by the first word of its name, and how it is read."""

Value = Leaf
"""What stands in a cell."""

MADE = frozenset({"slot_seconds", "result"})
"""Columns that no table has."""
_READ = tuple(name for name in COLUMNS if name not in MADE)
_OF_RESULT = frozenset({"state", "error", "best_validation", "searcher_steps"})
"""What says whether a trial has a result."""


class Row(NamedTuple):
    """One trial."""

    values: Mapping[str, Value]
    """By the names of :data:`COLUMNS`, and of metrics."""
    hparams: Mapping[str, Value]
    """Leaves by their dotted names."""


def cell_of(column: str) -> Callable[[Row], Value]:
    """Return what reads a column's value of a row: its name is looked at once for all rows."""
    if column.startswith(PREFIX):
        name = column.removeprefix(PREFIX)
        return lambda row: row.hparams.get(name)
    return lambda row: row.values[column]


def read_rows(
    connection: Connection,
    experiment_id: int,
    now: float | None = None,
    wanted: Collection[str] = COLUMNS,
    leaves: Mapping[int, Mapping[str, Value]] | None = None,
) -> list[Row]:
    """Read all trials of an experiment, the oldest first; two queries, and two for each metric.

    Args:
        connection: For reading.
        experiment_id: Whose trials.
        now: In seconds since 1970; until when runs that go on are counted.
        wanted: Columns that are needed besides the id and the hyperparameters.
        leaves: Hyperparameters that are known already, by the trial; the others are read.
    """
    known = leaves or {}
    there = {"id", *wanted} & set(_READ)
    if "result" in wanted:
        there |= _OF_RESULT
    names = sorted(there)
    query = (
        f"SELECT id, {', '.join(names)} FROM trials "  # noqa: S608 - our own names
        "WHERE experiment_id = ? ORDER BY id"
    )
    costs: Mapping[int, float] = {}
    metric = _searcher_metric(connection, experiment_id) if "result" in wanted else ""
    if "slot_seconds" in wanted:
        costs = slot_seconds_in(connection, experiment_id, now or time.time())
    measures = {
        column: measured
        for column in wanted
        if (measured := _measured(connection, experiment_id, column)) is not None
    }
    found = []
    made = bool(measures) or not MADE.isdisjoint(wanted)
    rows = raw_rows(connection, query, (experiment_id,))
    missing: Mapping[int, Mapping[str, Value]] = {}
    if any(row[0] not in known for row in rows):
        read = raw_rows(connection, _HPARAMS, (experiment_id,))
        missing = {number: leaves_of(text) for number, text in read if number not in known}
    for trial_id, *cells in rows:
        values: dict[str, Value] = dict(zip(names, cells, strict=True))
        found.append(Row(values, known[trial_id] if trial_id in known else missing[trial_id]))
        if not made:
            continue
        for column, measured in measures.items():
            values[column] = measured.get(trial_id)
        if "slot_seconds" in wanted:
            values["slot_seconds"] = costs.get(trial_id, 0.0)
        if "result" in wanted:
            values["result"] = has_result(values, metric)
    return found


def _searcher_metric(connection: Connection, experiment_id: int) -> str:
    query = "SELECT metric FROM experiments WHERE id = ?"
    return next((name for (name,) in raw_rows(connection, query, (experiment_id,))), "")


def _measured(
    connection: Connection, experiment_id: int, column: str
) -> dict[int, float | None] | None:
    """Return a metric of each trial; None if the column is no metric that was ever reported."""
    return _metric(
        connection, column, "SELECT id, {} FROM trials t WHERE experiment_id = ?", (experiment_id,)
    )


def measured_of_best(connection: Connection, column: str) -> dict[int, float | None] | None:
    """Return a metric of each experiment's best trial; of its first one while none is best.

    Returns:
        Values by the experiments' ids; None if the column is no metric that was ever reported.
    """
    return _metric(connection, column, _OF_BEST, ())


_OF_BEST = (
    "SELECT e.id, {} FROM experiments e JOIN trials t ON t.id = coalesce(e.best_trial_id, "
    "(SELECT min(id) FROM trials first WHERE first.experiment_id = e.id))"
)


def _metric(
    connection: Connection, column: str, query: str, values: tuple[int, ...]
) -> dict[int, float | None] | None:
    """Ask for a metric of the trials ``t`` of a query, beside what they go by."""
    what, _, metric = column.partition(".")
    group, _, name = metric.partition(".")
    if what not in METRICS or "\0" in column:
        return None
    keys = raw_rows(
        connection, "SELECT id FROM metric_keys WHERE group_name = ? AND name = ?", (group, name)
    )
    if not keys:
        return None
    value = METRICS[what].format(top=SHIFTS[-1])
    return dict(raw_rows(connection, query.format(value), (keys[0][0], *values)))


def read_columns(
    connection: Connection, experiment_id: int, now: float, wanted: Sequence[str]
) -> dict[str, list[Value]] | None:
    """Read columns of all trials of an experiment that are no hyperparameters, with their ids.

    Args:
        connection: For reading.
        experiment_id: Whose trials.
        now: In seconds since 1970; until when runs that go on are counted.
        wanted: Names of :data:`COLUMNS`, or of metrics.

    Returns:
        None if one of the names is neither.
    """
    there = {"id", *wanted} & set(_READ)
    if "result" in wanted:
        there |= _OF_RESULT
    names = sorted(there)
    query = f"SELECT {', '.join(names)} FROM trials WHERE experiment_id = ? ORDER BY id"  # noqa: S608
    rows = raw_rows(connection, query, (experiment_id,))
    read = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}
    found: dict[str, list[Value]] = {name: read.get(name, []) for name in names}
    ids: list[int] = read.get("id", [])
    for column in wanted:
        if column == "slot_seconds":
            costs = slot_seconds_in(connection, experiment_id, now) if rows else {}
            found[column] = [costs.get(each, 0.0) for each in ids]
        elif column == "result":
            fields = [found[name] for name in sorted(_OF_RESULT)]
            keys = sorted(_OF_RESULT)
            metric = _searcher_metric(connection, experiment_id)
            found[column] = [
                has_result(dict(zip(keys, each, strict=True)), metric)
                for each in zip(*fields, strict=True)
            ]
        elif column not in found:
            measured = _measured(connection, experiment_id, column)
            if measured is None:
                return None
            found[column] = [measured.get(each) for each in ids]
    return {name: found[name] for name in dict.fromkeys(("id", *wanted))}


def on_wire(value: Value) -> Value:
    """Return a value as JSON has it: infinities and NaN are texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return wire_number(value)
    return value


_HPARAMS = "SELECT id, hparams FROM trials WHERE experiment_id = ?"


def leaves_of(text: str) -> Mapping[str, Value]:
    """Take hyperparameters apart, as they are stored."""
    return take_apart(msgspec.json.decode(text))


def names(rows: Sequence[Row]) -> list[str]:
    """Return the names of all hyperparameters, in the order in which trials have them."""
    return list(dict.fromkeys(name for row in rows for name in row.hparams))


def is_column(column: str, rows: Iterable[Row]) -> bool:
    """Whether a column has that name; a hyperparameter or a metric, if any trial has it."""
    if column.partition(".")[0] in METRICS:
        return any(column in row.values for row in rows)
    if not column.startswith(PREFIX):
        return column in COLUMNS
    name = column.removeprefix(PREFIX)
    return any(name in row.hparams for row in rows)


def check_column(column: str, known: Iterable[str], what: str) -> str | None:
    """Say what is wrong with the name of a column; None if it is one.

    Args:
        column: A name.
        known: Names of the hyperparameters that there are.
        what: The parameter that gave it.
    """
    there = [*COLUMNS, *(PREFIX + name for name in known)]
    if column in there:
        return None
    if column.partition(".")[0] in METRICS:
        return no_metric(column, what)
    ending = f".{column.removeprefix(PREFIX)}"
    close = [name for name in there if name.endswith(ending)]
    close = close or difflib.get_close_matches(column, there, 1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(there)}"
    return f"{what}: must be a column, got {column[:200]!r}{hint}"[:2000]


def no_metric(column: str, what: str) -> str:
    """Say that a column, given by the parameter ``what``, is no metric that there is."""
    form = "last, min or max, a group and a name, as in max.validation.accuracy"
    return f"{what}: must be a metric that was reported ({form}), got {column[:200]!r}"


def refuse(problems: Sequence[str | None]) -> None:
    """Refuse a request if something is wrong with it.

    Raises:
        ConfigError: With all that is.
    """
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ConfigError("request", found)
