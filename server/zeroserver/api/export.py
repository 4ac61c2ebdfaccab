"""Every metric point of an experiment as text, streamed."""

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
_PAGE = 20_000
"""Points that are read at a time."""
_QUESTION = 10
"""What asking the database costs beside that, in points."""

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
    """Some points of one series, or why the rest of it is not there."""

    trial_id: int
    group: str | None
    """None when nothing of the trial can be read."""
    name: str | None
    rows: Rows = field(default_factory=list)
    problem: str | None = None


class _Line(msgspec.Struct, gc=False):
    """A point in NDJSON: written by msgspec, many times as fast as Python writes a float."""

    trial_id: int
    group: str | None
    name: str | None
    step: int
    value: float | str
    time_s: float | str


def export_ndjson(database: Database, trials: Sequence[int], group: str | None) -> Iterator[bytes]:
    """Yield one JSON object a line; ``time_s`` is in seconds since 1970.

    What cannot be read has a line with ``problem`` in its place.
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
    """Yield a CSV file with a header; what cannot be read is told in the place of a value."""
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
    """Yield what there is, some thousand points at a time.

    Each page has a connection for as long as it takes to read it: a client that does not read on
    holds none, nor an old view of the database.
    """
    place = _Place(deque(trials))
    while place.trials or place.series:
        page: list[Part] = []
        try:
            with database.read() as connection:
                _fill(page, connection, place, group)
        except StoreError as error:  # the answer has begun: only in its text can it be told
            page.append(place.skip(str(error)))
            if not error.damaged:
                place.end()
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

    def skip(self, problem: str) -> Part:
        """Leave out what was about to be read; return what is told in its place."""
        if not self.series:
            return Part(self.trials.popleft(), None, None, problem=problem)
        _, series = self.series.popleft()
        self.after = -1
        return Part(*series, problem=problem)

    def end(self) -> None:
        """Leave out all that is left."""
        self.trials.clear()
        self.series.clear()


def _fill(page: list[Part], connection: Connection, place: _Place, group: str | None) -> None:
    """Read some thousand points; what was read before a failure is in the page."""
    room = _PAGE
    while room > 0 and (place.trials or place.series):
        if not place.series:
            trial_id = place.trials[0]
            names = metric_names(connection, trial_id, group)
            place.trials.popleft()
            place.series.extend((key, (trial_id, of, name)) for key, of, name in names)
            room -= _QUESTION
            continue
        key_id, series = place.series[0]
        rows: Rows = raw_rows(connection, _POINTS, (series[0], key_id, place.after, room))
        if rows:
            page.append(Part(*series, rows))
        if len(rows) < room:
            place.series.popleft()
            place.after = -1
        else:
            place.after = rows[-1][0]
        room -= len(rows) + _QUESTION


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
