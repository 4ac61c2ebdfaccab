"""Every metric point of an experiment as text, streamed."""

import csv
import io
from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from zerolab.contract.wire import wire_number
from zeroserver.api.queries import metric_names
from zeroserver.store.database import raw_rows
from zeroserver.store.schema import trials

__all__ = ["CSV_HEADER", "export_csv", "export_ndjson"]

CSV_HEADER = ("trial_id", "group", "name", "step", "value", "time_s")
_CHUNK = 20_000

_POINTS = (
    "SELECT step, value, time FROM points WHERE trial_id = ? AND key_id = ? AND step > ? "
    "ORDER BY step LIMIT ?"
)

_FORMULA = ("=", "+", "-", "@", "\t", "\r")

Series = tuple[int, str, str]
"""Trial id, group and name."""

Rows = list[tuple[Any, ...]]
"""Step, value and time."""


def export_ndjson(connection: Connection, experiment_id: int, group: str | None) -> Iterator[bytes]:
    """Yield one JSON object a line; ``time_s`` is in seconds since 1970."""
    encode = msgspec.json.encode
    for (trial_id, group_name, name), rows in _chunks(connection, experiment_id, group):
        head = encode({"trial_id": trial_id, "group": group_name, "name": name}).decode()[:-1]
        yield "".join(
            f'{head},"step":{step},"value":{_json(value)},"time_s":{_json(time)}}}\n'
            for step, value, time in rows
        ).encode()


def export_csv(connection: Connection, experiment_id: int, group: str | None) -> Iterator[bytes]:
    """Yield a CSV file with a header."""
    yield (",".join(CSV_HEADER) + "\r\n").encode()
    for (trial_id, group_name, name), rows in _chunks(connection, experiment_id, group):
        text = io.StringIO()
        cells = (_cell(group_name), _cell(name))
        csv.writer(text).writerows(
            (trial_id, *cells, step, "NaN" if value is None else wire_number(value), time)
            for step, value, time in rows
        )
        yield text.getvalue().encode()


def _cell(text: str) -> str:
    """Keep a spreadsheet from reading text as a formula: a quote before it, as they do."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _json(value: float | None) -> str:
    if value is None:
        return '"NaN"'
    number = wire_number(value)
    return f'"{number}"' if isinstance(number, str) else repr(number)


def _chunks(
    connection: Connection, experiment_id: int, group: str | None
) -> Iterator[tuple[Series, Rows]]:
    ids = select(trials.c.id).where(trials.c.experiment_id == experiment_id).order_by(trials.c.id)
    for trial_id in connection.scalars(ids).all():
        for key_id, group_name, name in metric_names(connection, trial_id, group):
            after = -1
            while True:
                rows: Rows = raw_rows(connection, _POINTS, (trial_id, key_id, after, _CHUNK))
                if rows:
                    yield (trial_id, group_name, name), rows
                if len(rows) < _CHUNK:
                    break
                after = rows[-1][0]
