"""Metric points: stored exactly once, rolled up on arrival, read as charts.

A roll-up row contains the minimum, maximum, sum and count of the points within ``2**shift`` steps,
for each shift in :data:`SHIFTS`. Roll-ups are written with the points, so a chart of a million
points reads a thousand rows and still shows every spike. A repeated step replaces the value; the
roll-ups that contain it are then recomputed from the points.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from sqlalchemy import Connection

from zerolab.contract.messages import wire_number
from zerolab.contract.names import metric_name_problem
from zerolab.errors import ConfigError
from zeroserver.store.database import Transaction, raw_rows

__all__ = [
    "SHIFTS",
    "THINNED_SHIFT",
    "Curve",
    "MetricKeys",
    "Point",
    "forget_after",
    "json_number",
    "point_times",
    "read_curve",
    "store_points",
    "thinned_keys",
]

SHIFTS = (6, 10, 14, 18)
"""Levels of roll-ups: buckets of 64 to 262,144 steps, each of 16 buckets of the level below."""

THINNED_SHIFT = SHIFTS[1]
"""Finest level that remains when the points of old experiments are removed."""

MAX_STEP = 2**53
FORGOTTEN = 50_000
"""Default maximum number of points that one transaction deletes."""
_KEY_COST = 50
"""Fixed cost of a key, in points."""
_RAW_FACTOR = 16

Point = tuple[int, int, float | None, float]
"""Key id, step, value (None for NaN), time."""


class MetricKeys:
    """In-memory cache of the ids of metric names; only the writer creates new ones."""

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, int]] = {}

    def known(self, group: str) -> Mapping[str, int]:
        """Return the cached ids of a group by name."""
        return self._ids.setdefault(group, {})

    def find(self, transaction: Transaction, group: str, name: str) -> int:
        """Return the id of a metric; create it if necessary.

        Raises:
            ConfigError: If the name is empty or too long.
        """
        key_id = self.known(group).get(name)
        if key_id is not None:
            return key_id
        problem = metric_name_problem(name)
        if problem is not None:
            raise ConfigError("metric", [f"name: {problem}"])
        self.create(transaction, group, [name])
        return self._ids[group][name]

    def create(self, transaction: Transaction, group: str, names: Sequence[str]) -> None:
        """Create ids for valid names without one; a thousand take some milliseconds.

        Raises:
            ConfigError: If the name of the group is empty or too long.
        """
        problem = metric_name_problem(group)
        if problem is not None:
            raise ConfigError("metric", [f"group: {problem}"])
        ids = self._ids.setdefault(group, {})
        missing = [name for name in names if name not in ids]
        transaction.many(_NEW_KEY, [(group, name) for name in missing])
        for name in missing:
            ((ids[name],),) = transaction.raw(_FIND_KEY, (group, name))
        transaction.undo.append(lambda: self._forget(group, missing))

    def forget(self, keys: Collection[int]) -> None:
        """Drop the ids of deleted names from the cache."""
        for group, ids in self._ids.items():
            self._ids[group] = {name: key for name, key in ids.items() if key not in keys}

    def _forget(self, group: str, names: Iterable[str]) -> None:
        for name in names:
            self._ids[group].pop(name, None)


_NEW_KEY = (
    "INSERT INTO metric_keys (group_name, name) VALUES (?, ?) "
    "ON CONFLICT (group_name, name) DO NOTHING"
)
_FIND_KEY = "SELECT id FROM metric_keys WHERE group_name = ? AND name = ?"


class _Sums(msgspec.Struct):
    least: float | None = None
    most: float | None = None
    total: float = 0.0
    finite: int = 0
    count: int = 0
    last_step: int = 0

    @classmethod
    def of(cls, rows: Sequence[tuple[int, float | None]]) -> "_Sums":
        """Aggregate steps and values."""
        if len(rows) == 1:  # as in most reports
            ((step, value),) = rows
            if value is not None and math.isfinite(value):
                return cls(value, value, value, 1, 1, step)
        numbers = [value for _, value in rows if value is not None]
        least, most = min(numbers, default=None), max(numbers, default=None)
        finite = numbers
        if least == -math.inf or most == math.inf:
            finite = [number for number in numbers if math.isfinite(number)]
        last_step = max([step for step, _ in rows], default=0)
        return cls(least, most, sum(finite), len(finite), len(rows), last_step)

    def merged(self, other: "_Sums") -> "_Sums":
        """Return the combined sums of two buckets."""
        return _Sums(
            _pick(min, self.least, other.least),
            _pick(max, self.most, other.most),
            self.total + other.total,
            self.finite + other.finite,
            self.count + other.count,
            max(self.last_step, other.last_step),
        )

    def row(self) -> tuple[Any, ...]:
        total = self.total if math.isfinite(self.total) else math.copysign(1.7e308, self.total)
        return (self.least, self.most, total, self.finite, self.count, self.last_step)


def _pick(choose: Any, first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return float(choose(first, second))


_COLUMNS = "(trial_id, key_id, step, value, time)"
_INSERT = f"INSERT INTO points {_COLUMNS} VALUES (?, ?, ?, ?, ?) "  # noqa: S608 - our own words
_KEY = "ON CONFLICT (trial_id, key_id, step) "
_REPLACE = "DO UPDATE SET value = excluded.value, time = excluded.time"

_ROLLUP_COLUMNS = (
    "trial_id", "key_id", "shift", "bucket",
    "least", "most", "total", "finite", "count", "last_step",
)  # fmt: skip


def _rollup(rows: int) -> str:
    """Return the beginning of a statement that inserts or updates some roll-ups."""
    row = f"({', '.join('?' * len(_ROLLUP_COLUMNS))})"
    return (
        f"INSERT INTO rollups ({', '.join(_ROLLUP_COLUMNS)}) VALUES {', '.join([row] * rows)} "  # noqa: S608 - our own words
        "ON CONFLICT (trial_id, key_id, shift, bucket) DO UPDATE SET "
    )


_ROLLUP_NEW = _rollup(1) + (
    "least = excluded.least, most = excluded.most, total = excluded.total, "
    "finite = excluded.finite, count = excluded.count, last_step = excluded.last_step"
)


def _rollup_add(rows: int, least: str, most: str) -> str:
    return _rollup(rows) + (
        f"least = {least}(coalesce(rollups.least, excluded.least), "
        "coalesce(excluded.least, rollups.least)), "
        f"most = {most}(coalesce(rollups.most, excluded.most), "
        "coalesce(excluded.most, rollups.most)), "
        "total = rollups.total + excluded.total, "
        "finite = rollups.finite + excluded.finite, "
        "count = rollups.count + excluded.count, "
        f"last_step = {most}(rollups.last_step, excluded.last_step)"
    )


_ROLLUP_ADD = {
    (sqlite, rows): _rollup_add(rows, *functions)
    for sqlite, functions in ((True, ("min", "max")), (False, ("least", "greatest")))
    for rows in (1, len(SHIFTS))
}
"""Statements by database and number of rows."""


def store_points(transaction: Transaction, trial_id: int, new: Iterable[Point]) -> None:
    """Store points and update the roll-ups.

    Args:
        transaction: Transaction of the writer.
        trial_id: Trial of the points.
        new: Points to store; of repeated steps of a key the last one wins.
    """
    unique = {(key, step): (trial_id, key, step, value, time) for key, step, value, time in new}
    rows = list(unique.values())
    if not rows:
        return
    if transaction.sqlite:
        stored = transaction.many(_INSERT + _KEY + "DO NOTHING", rows)
    else:
        stored = _copy(transaction, rows)
    # The count shows whether all steps are new, without reading any. Sums may only be added for new
    # steps: a repeated step (of a restarted run or a repeated upload) would count twice. A minimum
    # cannot be removed from a roll-up, so such buckets are recomputed from the points.
    if stored == len(rows):
        _add_sums(transaction, trial_id, rows)
        return
    transaction.many(_INSERT + _KEY + _REPLACE, rows)
    _rebuild(transaction, trial_id, {(key, step >> SHIFTS[0]) for key, step in unique})


def _add_sums(transaction: Transaction, trial_id: int, new: list[tuple[Any, ...]]) -> None:
    """Add new points to the roll-ups, several rows in each statement, which costs less."""
    added = _sum_up((key, step, value) for _, key, step, value, _ in new)
    size = len(SHIFTS)
    end = len(added) - len(added) % size
    values = [
        tuple(value for row in added[first : first + size] for value in (trial_id, *row))
        for first in range(0, end, size)
    ]
    transaction.many(_ROLLUP_ADD[transaction.sqlite, size], values)
    rest = [(trial_id, *row) for row in added[end:]]
    transaction.many(_ROLLUP_ADD[transaction.sqlite, 1], rest)


def _copy(transaction: Transaction, rows: list[tuple[Any, ...]]) -> int:
    """Insert new rows through COPY; return their number."""
    connection = transaction.connection
    connection.exec_driver_sql(
        "CREATE TEMPORARY TABLE IF NOT EXISTS incoming (trial_id bigint, key_id bigint, "
        "step bigint, value double precision, time double precision) ON COMMIT DELETE ROWS"
    )
    connection.exec_driver_sql("TRUNCATE incoming")
    driver: Any = connection.connection.driver_connection
    statement = f"COPY incoming {_COLUMNS} FROM STDIN (FORMAT BINARY)"
    with driver.cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(["int8", "int8", "int8", "float8", "float8"])
        for row in rows:
            copy.write_row(row)
    return connection.exec_driver_sql(
        f"INSERT INTO points {_COLUMNS} SELECT trial_id, key_id, step, value, time "  # noqa: S608
        f"FROM incoming {_KEY} DO NOTHING"
    ).rowcount


def _sum_up(values: Iterable[tuple[int, int, float | None]]) -> list[tuple[Any, ...]]:
    """Return key, shift, bucket and sums of the roll-ups of some values."""
    finest = SHIFTS[0]
    buckets: defaultdict[tuple[int, int], list[tuple[int, float | None]]] = defaultdict(list)
    for key, step, value in values:
        buckets[key, step >> finest].append((step, value))
    level = {bucket: _Sums.of(rows) for bucket, rows in buckets.items()}
    if len({key for key, _ in level}) == len(level):  # as in most reports: equal at all levels
        return [
            (key, shift, number >> (shift - finest), *row)
            for (key, number), total in level.items()
            for row in (total.row(),)
            for shift in SHIFTS
        ]
    added = [(key, finest, number, *total.row()) for (key, number), total in level.items()]
    for lower, shift in pairwise(SHIFTS):
        above: dict[tuple[int, int], _Sums] = {}
        for (key, number), total in level.items():
            bucket = (key, number >> (shift - lower))
            above[bucket] = above[bucket].merged(total) if bucket in above else total
        added += [(key, shift, number, *total.row()) for (key, number), total in above.items()]
        level = above
    return added


def _rebuild(transaction: Transaction, trial_id: int, finest: set[tuple[int, int]]) -> None:
    """Recompute all roll-ups that contain some finest buckets, bottom up."""
    lower = SHIFTS[0]
    rows = []
    for key, number in finest:
        stored = transaction.raw(
            "SELECT step, value FROM points WHERE trial_id = ? AND key_id = ? "
            "AND step >= ? AND step < ?",
            (trial_id, key, number << lower, (number + 1) << lower),
        )
        rows.append((trial_id, key, lower, number, *_Sums.of(stored).row()))
    _put(transaction, rows)
    buckets = finest
    # Each level is recomputed from the 16 rows below it, not from its points: a late point of a
    # long trial reads 64 points and a few dozen rows, not all points of the coarsest bucket.
    for below, shift in pairwise(SHIFTS):
        buckets = {(key, number >> (shift - below)) for key, number in buckets}
        rows = []
        for key, number in buckets:
            stored = transaction.raw(
                "SELECT least, most, total, finite, count, last_step FROM rollups "
                "WHERE trial_id = ? AND key_id = ? AND shift = ? AND bucket >= ? AND bucket < ?",
                (trial_id, key, below, number << (shift - below), (number + 1) << (shift - below)),
            )
            total = _Sums()
            for row in stored:
                total = total.merged(_Sums(*row))
            rows.append((trial_id, key, shift, number, *total.row()))
        _put(transaction, rows)


def _put(transaction: Transaction, rows: list[tuple[Any, ...]]) -> None:
    """Write complete roll-up rows; delete those without points."""
    empty = [row[:4] for row in rows if row[8] == 0]
    transaction.many(_ROLLUP_NEW, [row for row in rows if row[8]])
    transaction.many(
        "DELETE FROM rollups WHERE trial_id = ? AND key_id = ? AND shift = ? AND bucket = ?", empty
    )


def forget_after(
    transaction: Transaction, trial_id: int, step: int, limit: int = FORGOTTEN
) -> int | None:
    """Delete a trial's points after ``step``, since a new run will report those steps again.

    Args:
        transaction: Transaction of the writer.
        trial_id: Trial of the points.
        step: Last step to keep.
        limit: Approximate maximum number of points to delete, last ones first.

    Returns:
        Cost in points; None if some are left: call it again in another transaction.
    """
    keys = transaction.raw(
        "SELECT DISTINCT key_id FROM rollups WHERE trial_id = ? AND shift = ? AND last_step > ?",
        (trial_id, SHIFTS[-1], step),
    )
    cuts: list[tuple[int, int]] = []
    remaining, done = limit, True
    # One key at a time can use the index: only the deleted part of a long trial is read.
    for (key,) in keys:
        if remaining <= 0:
            done = False
            break
        edge = transaction.raw(
            "SELECT step FROM points WHERE trial_id = ? AND key_id = ? AND step > ? "
            "ORDER BY step DESC LIMIT 1 OFFSET ?",
            (trial_id, key, step, remaining),
        )
        cut = edge[0][0] if edge else step
        done = done and not edge
        remaining -= _KEY_COST + transaction.run(
            "DELETE FROM points WHERE trial_id = ? AND key_id = ? AND step > ?",
            (trial_id, key, cut),
        )
        cuts.append((key, cut))
    transaction.many(
        "DELETE FROM rollups WHERE trial_id = ? AND shift = ? AND key_id = ? AND bucket > ?",
        [(trial_id, shift, key, cut >> shift) for shift in SHIFTS for key, cut in cuts],
    )
    _rebuild(transaction, trial_id, {(key, max(cut, 0) >> SHIFTS[0]) for key, cut in cuts})
    return limit - remaining if done else None


_READ_POINTS = (
    "SELECT step, value FROM points WHERE trial_id = ? AND key_id = ? "
    "AND step BETWEEN ? AND ? ORDER BY step"
)
_TIMES = "SELECT step, time FROM points WHERE trial_id = ? AND key_id = ?"
_OF_BUCKETS = "WHERE trial_id = ? AND shift = ? AND key_id = ? AND bucket BETWEEN ? AND ?"
_READ_EXTENT = f"SELECT min(bucket), max(last_step), sum(count) FROM rollups {_OF_BUCKETS}"  # noqa: S608 - our own words
_READ_ROLLUPS = (
    "SELECT last_step, least, most, total, finite "  # noqa: S608 - our own words
    f"FROM rollups {_OF_BUCKETS} ORDER BY bucket"
)


_HAS_EXPIRED = (
    "SELECT 1 FROM trials t JOIN experiments e ON e.id = t.experiment_id WHERE t.id = ? "
    "AND e.metrics_expired_at IS NOT NULL"
)
_THINNED = (
    "SELECT key_id FROM rollups "  # noqa: S608 - our own words
    f"WHERE trial_id = ? AND shift IN ({SHIFTS[0]}, {SHIFTS[-1]}) GROUP BY key_id "
    f"HAVING sum(CASE WHEN shift = {SHIFTS[0]} THEN count ELSE -count END) < 0"
)
_READ_COUNTED = (
    "SELECT last_step, least, most, total, finite, count "  # noqa: S608 - our own words
    f"FROM rollups {_OF_BUCKETS} ORDER BY bucket"
)


def thinned_keys(connection: Connection, trial_id: int) -> set[int]:
    """Return the ids of a trial's metrics of which points were removed by their retention."""
    if not raw_rows(connection, _HAS_EXPIRED, (trial_id,)):
        return set()
    return {key for (key,) in raw_rows(connection, _THINNED, (trial_id,))}


class Curve(msgspec.Struct, frozen=True):
    """Down-sampled metric over the steps, for a chart."""

    group: str
    name: str
    points: list[Any]
    """``[step, value]``; the value is a mean if down-sampled."""
    band: list[Any] | None
    """``[step, min, max, mean]`` if down-sampled, else None."""


def read_curve(
    connection: Connection,
    trial_id: int,
    key: tuple[int, str, str],
    max_points: int,
    within: tuple[int, int] = (0, MAX_STEP),
    *,
    thinned: bool = False,
) -> Curve:
    """Read one metric of a trial with at most ``max_points`` points.

    Reads at most a few thousand rows, regardless of the trial's length. The band always contains
    the minimum and maximum of merged points.

    Args:
        connection: Connection for reading.
        trial_id: Trial of the metric.
        key: Id, group and name of the metric.
        max_points: Maximum number of points, at least 1.
        within: First and last step.
        thinned: Whether points were removed; roll-ups then represent them.
    """
    key_id, group, name = key
    span, count = _extent(connection, trial_id, key_id, within)
    is_short = min(span, count) <= _RAW_FACTOR * max_points
    if is_short and thinned:
        rows = _thinned_rows(connection, trial_id, key_id, within)
        band = [_band_of_rollups(part) for part in _parts(rows, max_points)]
    elif is_short:
        raw = raw_rows(connection, _READ_POINTS, (trial_id, key_id, *within))
        if len(raw) <= max_points:
            return Curve(group, name, [[step, json_number(value)] for step, value in raw], None)
        band = [_band_of_points(part) for part in _parts(raw, max_points)]
    else:
        shift = max(_level(span, max_points), THINNED_SHIFT if thinned else 0)
        buckets = (within[0] >> shift, within[1] >> shift)
        rows = raw_rows(connection, _READ_ROLLUPS, (trial_id, shift, key_id, *buckets))
        band = [_band_of_rollups(part) for part in _parts(rows, max_points)]
    return Curve(group, name, [[row[0], row[3]] for row in band], band)


def point_times(
    connection: Connection, trial_id: int, key_id: int, steps: Sequence[int]
) -> list[float]:
    """Return the times at which some steps of a metric were reported, in seconds since 1970."""
    if not steps:
        return []
    marks = ", ".join("?" * len(steps))
    query = f"{_TIMES} AND step IN ({marks})"
    times = dict(raw_rows(connection, query, (trial_id, key_id, *steps)))
    return [times.get(step, 0.0) for step in steps]


def _extent(
    connection: Connection, trial_id: int, key_id: int, within: tuple[int, int]
) -> tuple[int, int]:
    """Return the number of steps from first to last point, and an upper bound of the points."""
    top = SHIFTS[-1]
    buckets = (within[0] >> top, within[1] >> top)
    ((first, last, count),) = raw_rows(connection, _READ_EXTENT, (trial_id, top, key_id, *buckets))
    if first is None:
        return 0, 0
    return min(last, within[1]) - max(int(first) << top, within[0]) + 1, int(count)


def _level(span: int, max_points: int) -> int:
    """Return the finest roll-up level with few enough rows over ``span`` steps."""
    return next((s for s in SHIFTS if span >> s <= 4 * max_points), SHIFTS[-1])


def _thinned_rows(
    connection: Connection, trial_id: int, key_id: int, within: tuple[int, int]
) -> list[tuple[Any, ...]]:
    """Read the roll-ups of a metric, or its points if none of these steps were removed."""
    first, last = (step >> THINNED_SHIFT for step in within)
    steps = (first << THINNED_SHIFT, ((last + 1) << THINNED_SHIFT) - 1)
    stored = raw_rows(connection, _READ_POINTS, (trial_id, key_id, *steps))
    rows = raw_rows(connection, _READ_COUNTED, (trial_id, THINNED_SHIFT, key_id, first, last))
    if len(stored) < sum(row[-1] for row in rows):
        return [row[:-1] for row in rows]
    inside = [point for point in stored if within[0] <= point[0] <= within[1]]
    return [(point[0], *_Sums.of([point]).row()[:4]) for point in inside]


def _parts(rows: list[tuple[Any, ...]], limit: int) -> Iterator[list[tuple[Any, ...]]]:
    """Split rows into a limited number of contiguous parts."""
    stride = -(-len(rows) // limit)
    return (rows[start : start + stride] for start in range(0, len(rows), stride))


def _band_of_points(part: list[tuple[Any, ...]]) -> list[Any]:
    numbers = [value for _, value in part if value is not None]
    least, most = min(numbers, default=None), max(numbers, default=None)
    if least == -math.inf or most == math.inf:
        numbers = [number for number in numbers if math.isfinite(number)]
    return _band(part[-1][0], least, most, sum(numbers), len(numbers))


def _band_of_rollups(part: list[tuple[Any, ...]]) -> list[Any]:
    if len(part) == 1:
        return _band(*part[0])
    least = min([row[1] for row in part if row[1] is not None], default=None)
    most = max([row[2] for row in part if row[2] is not None], default=None)
    total, finite = sum([row[3] for row in part]), sum([row[4] for row in part])
    return _band(part[-1][0], least, most, total, finite)


def _band(
    step: int, least: float | None, most: float | None, total: float, finite: int
) -> list[Any]:
    mean = total / finite if finite else least
    return [step, json_number(least), json_number(most), json_number(mean)]


def json_number(value: float | None) -> float | str:
    """Convert a stored value for JSON, which has no NaN or infinity."""
    return "NaN" if value is None else wire_number(value)
