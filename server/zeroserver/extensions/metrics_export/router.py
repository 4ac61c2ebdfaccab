"""Streamed export of all metric points of an experiment."""

import asyncio
import csv
import io
import math
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec
from fastapi import Query
from sqlalchemy import Connection, select
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from zerolab.contract.flatten import safe_cell
from zerolab.contract.messages import LENGTH_BYTES, MetricsColumns
from zeroserver.access.routes import ACCESS, shown
from zeroserver.api.common import IdPath, Whole
from zeroserver.api.queries import metric_names
from zeroserver.api.strict_route import resource_router
from zeroserver.api.trials import Group
from zeroserver.errors import BusyError, StoreError
from zeroserver.services import ServicesDep
from zeroserver.store.database import Database, raw_rows
from zeroserver.store.points import json_number
from zeroserver.store.rows import ExperimentRow, find_row
from zeroserver.store.schema import trials

__all__ = ["router"]

router = resource_router("/api/v1/experiments", "trials")

ACCESS["GET /api/v1/experiments/{experiment_id}/metrics/export"] = shown("experiment")

_CSV_HEADER = ("trial_id", "group", "name", "step", "value", "time_s")
_PAGE_POINTS = 20_000
"""Number of points per page."""
_EXPORTS = 16
"""Maximum number of concurrent exports; each keeps a page of points in memory."""
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


class _Selection(NamedTuple):
    """Points of an export."""

    trial_ids: Sequence[int]
    group: str | None
    """Group of the metrics; None for all."""
    names: frozenset[str]
    """Names of the metrics; empty for all."""


class Part(msgspec.Struct, frozen=True):
    """Points of one series, or the problem that ended it."""

    trial_id: int
    group: str | None
    """Series of the points; None if the trial cannot be read."""
    name: str | None
    rows: Rows = msgspec.field(default_factory=list)
    problem: str | None = None


class _Line(msgspec.Struct, gc=False):
    """Line of NDJSON, encoded by msgspec, which is much faster than json."""

    trial_id: int
    group: str | None
    name: str | None
    step: int
    value: float | str
    time_s: float | str


def _ndjson(database: Database, selection: _Selection) -> Iterator[bytes]:
    """Yield one JSON object per line; ``time_s`` is in seconds since 1970.

    A series that cannot be read yields a line with ``problem``.
    """
    encode = msgspec.json.Encoder().encode_lines
    for page in _pages(database, selection):
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


def _columns(database: Database, selection: _Selection) -> Iterator[bytes]:
    """Yield frames of the columns format, which is much faster to write and read than text.

    A frame is its length, and :class:`MetricsColumns` in MessagePack.
    """
    encode = msgspec.msgpack.Encoder().encode
    for page in _pages(database, selection):
        frames = []
        for part in page:
            steps, values, times = zip(*part.rows, strict=True) if part.rows else ((), (), ())
            columns = MetricsColumns(
                part.trial_id, part.group, part.name,
                array("q", steps).tobytes(), _numbers(values), _numbers(times), part.problem,
            )  # fmt: skip
            frame = encode(columns)
            frames += [len(frame).to_bytes(LENGTH_BYTES, "little"), frame]
        yield b"".join(frames)


def _numbers(column: Sequence[float | None]) -> bytes:
    try:
        return array("d", cast("Sequence[float]", column)).tobytes()
    except TypeError:  # None, which means NaN
        return array("d", [math.nan if item is None else item for item in column]).tobytes()


def _csv(database: Database, selection: _Selection) -> Iterator[bytes]:
    """Yield a CSV file with a header; read failures appear in the value column."""
    yield (",".join(_CSV_HEADER) + "\r\n").encode()
    for page in _pages(database, selection):
        text = io.StringIO()
        for part in page:
            cells = (part.trial_id, safe_cell(part.group or ""), safe_cell(part.name or ""))
            csv.writer(text).writerows(
                (*cells, step, json_number(value), time) for step, value, time in part.rows
            )
            if part.problem is not None:
                csv.writer(text).writerow((*cells, "", safe_cell(f"problem: {part.problem}"), ""))
        yield text.getvalue().encode()


def _pages(database: Database, selection: _Selection) -> Iterator[list[Part]]:
    """Yield pages of some thousand points.

    A connection is open only while a page is read. A slow client therefore holds neither a
    connection nor an old snapshot of the database.
    """
    cursor = _Cursor(deque(selection.trial_ids))
    while cursor.trials or cursor.series:
        page: list[Part] = []
        try:
            with database.read() as connection:
                _fill(page, connection, cursor, selection)
        except StoreError as error:  # the response has started, so the status cannot change
            page.append(cursor.skip(str(error)))
            if not error.damaged:
                cursor.end()
        if page:
            yield page


class _Cursor(msgspec.Struct):
    """Position of an export."""

    trials: deque[int]
    series: deque[tuple[int, Series]] = msgspec.field(default_factory=deque)
    """Remaining series of the current trial, with their key ids."""
    after: int = -1
    """Last step read of the first series."""

    def skip(self, problem: str) -> Part:
        """Skip the current series or trial; return a part with the problem."""
        if not self.series:
            return Part(self.trials.popleft(), None, None, problem=problem)
        _, series = self.series.popleft()
        self.after = -1
        return Part(*series, problem=problem)

    def end(self) -> None:
        """Skip all remaining trials."""
        self.trials.clear()
        self.series.clear()


def _fill(page: list[Part], connection: Connection, cursor: _Cursor, selection: _Selection) -> None:
    """Add some thousand points to the page; points before a failure stay in it."""
    room = _PAGE_POINTS
    while room > 0 and (cursor.trials or cursor.series):
        if not cursor.series:
            trial_id = cursor.trials[0]
            names = metric_names(connection, trial_id, selection.group)
            cursor.trials.popleft()
            cursor.series.extend(
                (key, (trial_id, of, name))
                for key, of, name in names
                if not selection.names or name in selection.names
            )
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


class _Turns(asyncio.Semaphore):
    """Semaphore of running exports."""

    def __init__(self) -> None:
        super().__init__(_EXPORTS)


class _ExportResponse(StreamingResponse):
    """Streaming response of an export, with a limit of concurrent exports.

    Args:
        turns: asyncio.Semaphore that limits concurrent exports.
        rows: Content.
        options: Options of the base class.
    """

    def __init__(self, turns: asyncio.Semaphore, rows: Iterator[bytes], **options: Any) -> None:
        super().__init__(rows, **options)
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the export.

        Raises:
            BusyError: If too many exports are running.
        """
        if self._turns.locked():
            msg = "too many exports are in progress; wait until one has ended"
            raise BusyError(msg)
        async with self._turns:
            await super().__call__(scope, receive, send)


_NDJSON = "application/x-ndjson"
_MEDIA = {
    "ndjson": _NDJSON,
    "csv": "text/csv; charset=utf-8",
    "columns": "application/octet-stream",
}
_EXPORT: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {_NDJSON: {}, "text/csv": {}, "application/octet-stream": {}},
        "description": "Every point.",
    }
}

_WRITERS = {"ndjson": _ndjson, "csv": _csv, "columns": _columns}


@router.get(
    "/{experiment_id}/metrics/export",
    response_class=StreamingResponse,
    responses=_EXPORT,
)
async def export_metrics(
    services: ServicesDep,
    experiment_id: IdPath,
    format: Literal["ndjson", "csv", "columns"] = "ndjson",  # noqa: A002 - name of the query parameter
    group: Group = None,
    name: Annotated[
        list[str] | None, Query(max_length=1000, description="Metric; may be repeated.")
    ] = None,
    *,
    trial_id: Annotated[Whole | None, Query(description="Only this trial.")] = None,
) -> StreamingResponse:
    """Stream every metric point of an experiment."""
    trial_ids = await services.read(lambda connection: _trials_of(connection, experiment_id))
    if trial_id is not None:
        trial_ids = [trial_id] if trial_id in trial_ids else []
    selection = _Selection(trial_ids, group, frozenset(name or ()))
    rows = _WRITERS[format](services.database, selection)
    file_name = f'attachment; filename="experiment-{experiment_id}.{format}"'
    headers = {"Content-Disposition": file_name}
    return _ExportResponse(services.part(_Turns), rows, media_type=_MEDIA[format], headers=headers)


def _trials_of(connection: Connection, experiment_id: int) -> list[int]:
    find_row(connection, ExperimentRow, experiment_id)
    query = select(trials.c.id).where(trials.c.experiment_id == experiment_id)
    return list(connection.scalars(query.order_by(trials.c.id)))
