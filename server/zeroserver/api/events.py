"""Event streams of changes with a cursor (server-sent events)."""

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from fastapi import Header
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection, select

from zerolab.errors import NotFoundError
from zeroserver.access.principal import Principal, PrincipalDep
from zeroserver.api import queries
from zeroserver.api.common import IdPath
from zeroserver.api.resources import Log
from zeroserver.api.strict_route import resource_router
from zeroserver.event_journal import ALL, LISTED_KINDS, Entry
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.services import Services, ServicesDep
from zeroserver.store.rows import ExperimentRow, LogRow, TrialRow, find_row, read_rows
from zeroserver.store.schema import checkpoints, logs, trials

__all__ = ["router"]

router = resource_router("/api/v1", "events")

_PAUSE_S = 15.0
"""Idle time after which a comment is sent, to detect dead connections."""

_MANY = 1000

_SHOWN_KINDS = {"experiment", "trial", "metric"}
"""Events that share links show."""

LastEventId = Annotated[str | None, Header(max_length=100)]

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Events, until the client leaves."}
}

Event = tuple[int | None, str, Any]
"""Number of the journal entry, name and data."""


@router.get("/experiments/{experiment_id}/events", response_class=StreamingResponse,
            responses=_STREAM)  # fmt: skip
async def follow_experiment(
    services: ServicesDep,
    principal: PrincipalDep,
    experiment_id: IdPath,
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Stream the events of an experiment: experiment, trial, metric, checkpoint and log."""
    await services.read(lambda connection: find_row(connection, ExperimentRow, experiment_id))
    return _stream(services, principal, experiment_id, last_event_id)


@router.get("/events", response_class=StreamingResponse, responses=_STREAM)
async def follow_all(
    services: ServicesDep, principal: PrincipalDep, last_event_id: LastEventId = None
) -> StreamingResponse:
    """Stream the events of all experiments: experiment, trial, and cluster (agents and runs)."""
    return _stream(services, principal, ALL, last_event_id)


def _stream(
    services: Services, principal: Principal, experiment_id: int, cursor: str | None
) -> StreamingResponse:
    return StreamingResponse(
        _text(services, principal, experiment_id, cursor),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


async def _text(
    services: Services, principal: Principal, experiment_id: int, cursor: str | None
) -> AsyncIterator[bytes]:
    journal, users = services.journal, services.orchestrator.users
    revision = users.revision
    yield b"retry: 1000\n\n"
    async with aclosing(journal.follow(experiment_id, cursor, _PAUSE_S)) as groups:
        async for entries in groups:
            if services.keys.is_revoked(principal) or revision != users.revision:
                return  # the reader connects again, and is refused if its right has ended
            if entries is None:
                first = await services.read(
                    lambda connection: _everything(connection, services.orchestrator, experiment_id)
                )
                for _, name, data in first:
                    yield _event(None, name, data)
                continue
            shown = entries
            if principal.kind == "share":
                shown = [entry for entry in entries if entry.kind in _SHOWN_KINDS]
            events = await _load(services, shown, experiment_id)
            for number, name, data in events:
                yield _event(journal.cursor(number) if number else None, name, data)
            if not events:
                yield b": nothing new\n\n"


async def _load(services: Services, entries: list[Entry], experiment_id: int) -> list[Event]:
    if experiment_id == ALL:
        entries = [entry for entry in entries if entry.kind in LISTED_KINDS]
    if not entries:
        return []
    return await services.read(
        lambda connection: _resources(connection, services.orchestrator, entries)
    )


def _resources(
    connection: Connection, orchestrator: Orchestrator, entries: list[Entry]
) -> list[Event]:
    """Convert entries to events with current data; a repeatedly changed object appears once."""
    last = {_key(entry): entry.number for entry in entries}
    result: list[Event] = []
    for entry in entries:
        if last[_key(entry)] == entry.number:
            result += [
                (entry.number, entry.kind, data) for data in _data(connection, orchestrator, entry)
            ]
    return result


def _key(entry: Entry) -> tuple[str, Any]:
    unique = entry.kind in {"metric", "log"}
    return entry.kind, entry.number if unique else entry.resource


def _data(connection: Connection, orchestrator: Orchestrator, entry: Entry) -> Iterable[Any]:
    if entry.kind in {"metric", "cluster"}:  # the entry contains the data
        return [msgspec.Raw(entry.resource)]
    if entry.kind == "log":
        first, last = entry.resource
        query = select(logs).where(
            logs.c.id.between(first, last), logs.c.experiment_id == entry.experiment_id
        )
        return [Log.of(row) for row in read_rows(connection, LogRow, query.order_by(logs.c.id))]
    if entry.kind == "checkpoint":
        rows = connection.execute(select(checkpoints).where(checkpoints.c.uuid == entry.resource))
        return queries.checkpoint_list(connection, rows.all())
    try:
        if entry.kind == "experiment":
            experiment = find_row(connection, ExperimentRow, entry.resource)
            return [queries.experiment(experiment, orchestrator)]
        trial = find_row(connection, TrialRow, entry.resource)
        return queries.trial_list(connection, [trial], orchestrator)
    except NotFoundError:  # deleted concurrently
        return [{"id": entry.resource, "deleted": True}]


def _everything(
    connection: Connection, orchestrator: Orchestrator, experiment_id: int
) -> list[Event]:
    """Return the current state and reload events, for a reader that may have missed events."""
    reload = [(None, name, {"reload": True}) for name in ("metric", "checkpoint", "log")]
    if experiment_id == ALL:
        return [(None, "experiment", {"reload": True})]
    row = find_row(connection, ExperimentRow, experiment_id)
    events: list[Event] = [(None, "experiment", queries.experiment(row, orchestrator))]
    if row.num_trials > _MANY:
        return [*events, (None, "trial", {"reload": True}), *reload]
    query = select(trials).where(trials.c.experiment_id == experiment_id).order_by(trials.c.id)
    rows = read_rows(connection, TrialRow, query)
    result = queries.trial_list(connection, rows, orchestrator)
    return events + [(None, "trial", item) for item in result] + reload


def _event(cursor: str | None, name: str, data: Any) -> bytes:
    head = b"" if cursor is None else f"id: {cursor}\n".encode()
    return b"%sevent: %s\ndata: %s\n\n" % (head, name.encode(), msgspec.json.encode(data))
