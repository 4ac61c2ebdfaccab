"""Every metric point of an experiment as text, streamed."""

import csv
import io
from asyncio import Semaphore
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import Connection, select
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from zerolab.contract.wire import wire_number
from zeroserver.api.queries import metric_names
from zeroserver.errors import BusyError
from zeroserver.store.database import Database, raw_rows
from zeroserver.store.schema import trials

__all__ = ["CSV_HEADER", "ExportResponse", "export_csv", "export_ndjson"]

CSV_HEADER = ("trial_id", "group", "name", "step", "value", "time_s")
_PAGE = 20_000
"""Points that are read at a time."""
_QUESTION = 10
"""What asking the database costs beside that, in points."""

_POINTS = (
    "SELECT step, value, time FROM points WHERE trial_id = ? AND key_id = ? AND step > ? "
    "ORDER BY step LIMIT ?"
)

_FORMULA = ("=", "+", "-", "@", "\t", "\r")

Series = tuple[int, str, str]
"""Trial id, group and name."""

Rows = list[tuple[Any, ...]]
"""Step, value and time."""


Part = tuple[Series, Rows]
"""Some points of one series."""


def export_ndjson(database: Database, experiment_id: int, group: str | None) -> Iterator[bytes]:
    """Yield one JSON object a line; ``time_s`` is in seconds since 1970."""
    encode = msgspec.json.encode
    for page in _pages(database, experiment_id, group):
        lines: list[str] = []
        for (trial_id, group_name, name), rows in page:
            head = encode({"trial_id": trial_id, "group": group_name, "name": name}).decode()[:-1]
            lines += [
                f'{head},"step":{step},"value":{_json(value)},"time_s":{_json(time)}}}\n'
                for step, value, time in rows
            ]
        yield "".join(lines).encode()


def export_csv(database: Database, experiment_id: int, group: str | None) -> Iterator[bytes]:
    """Yield a CSV file with a header."""
    yield (",".join(CSV_HEADER) + "\r\n").encode()
    for page in _pages(database, experiment_id, group):
        text = io.StringIO()
        for (trial_id, group_name, name), rows in page:
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


def _pages(database: Database, experiment_id: int, group: str | None) -> Iterator[list[Part]]:
    """Yield what there is, some thousand points at a time.

    Each page has a connection for as long as it takes to read it: a client that does not read on
    holds none, nor an old view of the database.
    """
    ids = select(trials.c.id).where(trials.c.experiment_id == experiment_id).order_by(trials.c.id)
    with database.read() as connection:
        todo = deque(connection.scalars(ids))
    place = _Place(todo)
    while place.trials or place.series:
        with database.read() as connection:
            page = _page(connection, place, group)
        if page:
            yield page


@dataclass
class _Place:
    """How far an export has come."""

    trials: deque[int]
    series: deque[tuple[int, Series]] = field(default_factory=deque)
    """Of the trial that has been begun: key id, and what it is called."""
    after: int = -1
    """Last step of the first series that has been read."""


def _page(connection: Connection, place: _Place, group: str | None) -> list[Part]:
    page: list[Part] = []
    room = _PAGE
    while room > 0 and (place.trials or place.series):
        if not place.series:
            trial_id = place.trials.popleft()
            names = metric_names(connection, trial_id, group)
            place.series.extend((key, (trial_id, of, name)) for key, of, name in names)
            room -= _QUESTION
            continue
        key_id, series = place.series[0]
        rows: Rows = raw_rows(connection, _POINTS, (series[0], key_id, place.after, room))
        if rows:
            page.append((series, rows))
        if len(rows) < room:
            place.series.popleft()
            place.after = -1
        else:
            place.after = rows[-1][0]
        room -= len(rows) + _QUESTION
    return page


class ExportResponse(StreamingResponse):
    """An export on its way; only so many at a time.

    Args:
        turns: Taken by each, for as long as it is sent.
        rows: What to send.
        options: Those of the base class.
    """

    def __init__(self, turns: Semaphore, rows: Iterator[bytes], **options: Any) -> None:
        super().__init__(rows, **options)
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it.

        Raises:
            BusyError: If too many are on their way.
        """
        if self._turns.locked():
            msg = "too many exports are on their way; wait until one of them has ended"
            raise BusyError(msg)
        async with self._turns:
            await super().__call__(scope, receive, send)
