"""Streamed export of all metric points of an experiment."""

import csv
import io
from asyncio import Semaphore
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import Connection
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from zerolab.contract.spreadsheet import safe_cell
from zeroserver.api.queries import metric_names
from zeroserver.errors import BusyError, StoreError
from zeroserver.store.database import Database, raw_rows
from zeroserver.store.points import json_number

__all__ = ["CSV_HEADER", "ExportResponse", "export_csv", "export_ndjson"]

CSV_HEADER = ("trial_id", "group", "name", "step", "value", "time_s")
_PAGE_POINTS = 20_000
"""Number of points read at a time."""
_QUERY_COST = 10
"""Fixed cost of a query, in points."""

_POINTS = (
    "SELECT step, value, time FROM points WHERE trial_id = ? AND key_id = ? AND step > ? "
    "ORDER BY step LIMIT ?"
)

Series = tuple[int, str, str]
"""Trial id, group and name."""

Rows = list[tuple[Any, ...]]
"""Step, value and time."""


@dataclass(frozen=True)
class Part:
    """Points of one series, or the problem that ended it."""

    trial_id: int
    group: str | None
    """None if the trial cannot be read at all."""
    name: str | None
    rows: Rows = field(default_factory=list)
    problem: str | None = None


class _Line(msgspec.Struct, gc=False):
    """Line of NDJSON; msgspec encodes floats many times as fast as Python."""

    trial_id: int
    group: str | None
    name: str | None
    step: int
    value: float | str
    time_s: float | str


def export_ndjson(database: Database, trials: Sequence[int], group: str | None) -> Iterator[bytes]:
    """Yield one JSON object a line; ``time_s`` is in seconds since 1970.

    A series that cannot be read yields a line with ``problem``.
    """
    encode = msgspec.json.Encoder().encode_lines
    for page in _pages(database, trials, group):
        lines: list[_Line | dict[str, Any]] = []
        for part in page:
            trial_id, of, name = part.trial_id, part.group, part.name
            lines += [
                _Line(trial_id, of, name, step, json_number(value), json_number(time))
                for step, value, time in part.rows
            ]
            if part.problem is not None:
                series = {"trial_id": trial_id, "group": of, "name": name}
                lines.append(series | {"problem": part.problem})
        yield encode(lines)


def export_csv(database: Database, trials: Sequence[int], group: str | None) -> Iterator[bytes]:
    """Yield a CSV file with a header; a read failure is shown in the value column."""
    yield (",".join(CSV_HEADER) + "\r\n").encode()
    for page in _pages(database, trials, group):
        text = io.StringIO()
        for part in page:
            cells = (part.trial_id, safe_cell(part.group or ""), safe_cell(part.name or ""))
            csv.writer(text).writerows(
                (*cells, step, json_number(value), time) for step, value, time in part.rows
            )
            if part.problem is not None:
                csv.writer(text).writerow((*cells, "", safe_cell(f"problem: {part.problem}"), ""))
        yield text.getvalue().encode()


def _pages(database: Database, trials: Sequence[int], group: str | None) -> Iterator[list[Part]]:
    """Yield pages of some thousand points.

    A connection is open only while a page is read. A slow client therefore holds neither a
    connection nor an old snapshot of the database.
    """
    cursor = _Cursor(deque(trials))
    while cursor.trials or cursor.series:
        page: list[Part] = []
        try:
            with database.read() as connection:
                _fill(page, connection, cursor, group)
        except StoreError as error:  # too late for an HTTP status: the response has begun
            page.append(cursor.skip(str(error)))
            if not error.damaged:
                cursor.end()
        if page:
            yield page


@dataclass
class _Cursor:
    """Position of an export."""

    trials: deque[int]
    series: deque[tuple[int, Series]] = field(default_factory=deque)
    """Remaining series of the current trial, with their key ids."""
    after: int = -1
    """Last step that was read of the first series."""

    def skip(self, problem: str) -> Part:
        """Skip the current series or trial; return a part with the problem."""
        if not self.series:
            return Part(self.trials.popleft(), None, None, problem=problem)
        _, series = self.series.popleft()
        self.after = -1
        return Part(*series, problem=problem)

    def end(self) -> None:
        """Skip everything that remains."""
        self.trials.clear()
        self.series.clear()


def _fill(page: list[Part], connection: Connection, cursor: _Cursor, group: str | None) -> None:
    """Add some thousand points to the page; points before a failure stay in it."""
    room = _PAGE_POINTS
    while room > 0 and (cursor.trials or cursor.series):
        if not cursor.series:
            trial_id = cursor.trials[0]
            names = metric_names(connection, trial_id, group)
            cursor.trials.popleft()
            cursor.series.extend((key, (trial_id, of, name)) for key, of, name in names)
            room -= _QUERY_COST
            continue
        key_id, series = cursor.series[0]
        rows: Rows = raw_rows(connection, _POINTS, (series[0], key_id, cursor.after, room))
        if rows:
            page.append(Part(*series, rows))
        if len(rows) < room:
            cursor.series.popleft()
            cursor.after = -1
        else:
            cursor.after = rows[-1][0]
        room -= len(rows) + _QUERY_COST


class ExportResponse(StreamingResponse):
    """Streaming response of an export, with a limit of concurrent exports.

    Args:
        turns: Semaphore that limits concurrent exports.
        rows: Content.
        options: Options of the base class.
    """

    def __init__(self, turns: Semaphore, rows: Iterator[bytes], **options: Any) -> None:
        super().__init__(rows, **options)
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the export.

        Raises:
            BusyError: If too many exports are running.
        """
        if self._turns.locked():
            msg = "too many exports are on their way; wait until one of them has ended"
            raise BusyError(msg)
        async with self._turns:
            await super().__call__(scope, receive, send)
