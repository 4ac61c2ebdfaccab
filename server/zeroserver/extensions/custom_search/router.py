"""Routes of custom searchers: programs poll for events and send operations."""

import asyncio
import math
import time
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import Connection, select

from zerolab.contract.messages import wire_number
from zerolab.searcher import Continue, Create, Operation, Shutdown, Stop
from zeroserver.access.routes import ACCESS, SEARCH, own
from zeroserver.api.common import MAX_ID, IdPath
from zeroserver.api.rows import Num, Resource
from zeroserver.api.runs import MAX_WAIT_S
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.custom_search.service import Answered, CustomSearchService
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services, ServicesDep
from zeroserver.states import EXPERIMENT_ENDED, EXPERIMENT_STOPPING
from zeroserver.store.rows import ExperimentRow, SearcherEventRow, find_row, read_rows
from zeroserver.store.schema import searcher_events

__all__ = ["SearchEvent", "SearchEvents", "SearchHandled", "router"]

router = resource_router("/api/v1/experiments", "search")

ACCESS["GET /api/v1/experiments/{experiment_id}/searcher/events"] = SEARCH
ACCESS["POST /api/v1/experiments/{experiment_id}/searcher/operations"] = own(
    "experiment", callers=frozenset({"search"})
)

_MOST_EVENTS = 1000

Number = Annotated[int, Field(ge=1, le=2**31 - 1)]


class SearchEvent(Resource, frozen=True):
    """Event for a searcher."""

    id: int
    """Id, increasing with gaps."""
    kind: Literal["created", "validated", "exited", "exited_early"]
    """Kind of the event."""
    trial_id: int
    """The searcher's number of the trial, from its creation."""
    metric: Num | None
    """Metric of `validated`; `NaN` ranks last."""
    length: float | None
    """Length of the trial at `validated`, in the unit of the search."""
    reason: str | None
    """Reason of `exited_early`: `errored`, `invalid_hp` or `user_canceled`."""


class SearchEvents(Resource, frozen=True):
    """Events of a search, oldest first."""

    events: list[SearchEvent]
    """Events, at most 1,000."""
    handled: int
    """Last event that operations have handled; -1 before the first operations, 0 after them."""
    over: bool
    """Whether the experiment accepts no more operations."""


class SearchHandled(Resource, frozen=True):
    """Response to operations."""

    handled: int
    """Last event that operations have handled."""


def _check_names(hparams: dict[str, Any]) -> dict[str, Any]:
    """Validate the names of hyperparameters.

    Raises:
        ValueError: If a name has control characters.
    """
    from zerolab.schema.json_values import key_problems  # startup does not need it

    if problems := key_problems(hparams, "hparams"):
        raise ValueError("; ".join(problems))
    return hparams


class CreateBody(BaseModel):
    """Start a trial."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["create"]
    trial_id: Number
    hparams: Annotated[dict[str, Any], AfterValidator(_check_names)]
    trial_seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    source: Number | None = None


class ContinueBody(BaseModel):
    """Train a trial to a length, then pause it."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["continue"]
    trial_id: Number
    until: Annotated[int, Field(ge=1, le=MAX_ID)]


class StopBody(BaseModel):
    """End a trial after a checkpoint."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["stop"]
    trial_id: Number


class ShutdownBody(BaseModel):
    """End the search: create no more trials."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["shutdown"]


AnyOperation = Annotated[
    CreateBody | ContinueBody | StopBody | ShutdownBody, Field(discriminator="kind")
]


class OperationsBody(BaseModel):
    """Operations and the events that they handle."""

    model_config = ConfigDict(extra="forbid")

    after: Annotated[int, Field(ge=-1, le=MAX_ID)]
    """Last event handled before; -1 before the first operations."""
    handled: Annotated[int, Field(ge=0, le=MAX_ID)]
    """Last event handled by these operations; 0 for the first operations."""
    operations: Annotated[list[AnyOperation], Field(max_length=10_000)]
    progress: Annotated[float, Field(ge=0, le=1)] | None = None


@router.get("/{experiment_id}/searcher/events")
async def get_search_events(
    services: ServicesDep,
    experiment_id: IdPath,
    after: Annotated[int, Query(ge=0, le=MAX_ID, description="Events after this one.")] = 0,
    wait_s: Annotated[float, Query(ge=0, le=60, description="Maximum wait in seconds.")] = 0,
) -> SearchEvents:
    """Wait for the events of a custom searcher and return them."""
    end = time.monotonic() + min(wait_s, MAX_WAIT_S)
    with services.hub.listen(f"searcher:{experiment_id}") as bell:
        while True:
            if not services.hub.closed:
                bell.clear()
            news = await _events(services, experiment_id, after)
            remaining = end - time.monotonic()
            if news.events or news.over or remaining <= 0 or services.hub.closed:
                return news
            try:
                async with asyncio.timeout(min(remaining, 1.0)):  # the experiment may end
                    await bell.wait()
            except TimeoutError:
                continue


async def _events(services: Services, experiment_id: int, after: int) -> SearchEvents:
    row = await services.read(lambda connection: find_row(connection, ExperimentRow, experiment_id))
    over = row.state in EXPERIMENT_ENDED | EXPERIMENT_STOPPING
    handled = -1
    if not over:
        await services.load_searcher(experiment_id)
        handled = await services.write(
            lambda work: CustomSearchService(work).handled(experiment_id)
        )
    events = await services.read(lambda connection: _read(connection, experiment_id, after))
    return SearchEvents(events, handled, over)


def _read(connection: Connection, experiment_id: int, after: int) -> list[SearchEvent]:
    columns = searcher_events.c
    query = (
        select(searcher_events)
        .where(
            columns.experiment_id == experiment_id, columns.id > after, columns.kind != "operated"
        )
        .order_by(columns.id)
        .limit(_MOST_EVENTS)
    )
    news = []
    for row in read_rows(connection, SearcherEventRow, query):
        metric: Any = None
        if row.kind == "validated":
            metric = wire_number(math.nan if row.value is None else row.value)
        news.append(SearchEvent.of(row, trial_id=row.request_id, metric=metric))
    return news


@router.post("/{experiment_id}/searcher/operations")
async def post_operations(
    services: ServicesDep, experiment_id: IdPath, body: OperationsBody
) -> SearchHandled:
    """Send the operations of a custom searcher; idempotent."""
    operations = [_operation(operation) for operation in body.operations]
    message = Answered(body.after, body.handled, operations, body.progress)
    await services.load_searcher(experiment_id)
    start: int | None = 0
    handled = -1
    while start is not None:  # other jobs may run in between

        def job(work: UnitOfWork, start: int = start) -> tuple[int, int | None]:
            return CustomSearchService(work).take_operations(experiment_id, message, start)

        handled, start = await services.write(job)
    return SearchHandled(handled)


def _operation(body: CreateBody | ContinueBody | StopBody | ShutdownBody) -> Operation:
    match body:
        case CreateBody():
            return Create(body.trial_id, body.hparams, body.trial_seed, body.source)
        case ContinueBody():
            return Continue(body.trial_id, body.until)
        case StopBody():
            return Stop(body.trial_id)
        case ShutdownBody():
            return Shutdown()
