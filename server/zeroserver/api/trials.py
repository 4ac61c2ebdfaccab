"""Trials, their metrics, checkpoints and logs."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import ColumnElement, Connection, select

from zeroserver.api import queries
from zeroserver.api.common import (
    After,
    IdPath,
    Level,
    Limit,
    LineCursor,
    Rank,
    Tail,
    answer,
)
from zeroserver.api.export import ExportResponse, export_csv, export_ndjson
from zeroserver.api.queries import PageRequest
from zeroserver.api.resources import (
    CheckpointAnswer,
    CheckpointPage,
    Curve,
    Log,
    LogPage,
    MetricName,
    MetricNames,
    Metrics,
    TrialAnswer,
    TrialPage,
)
from zeroserver.api.rows import respond
from zeroserver.orchestrator import control
from zeroserver.services import ReadDep, ServicesDep
from zeroserver.states import TrialState
from zeroserver.store.points import MAX_STEP, read_curve
from zeroserver.store.schema import checkpoints, experiments, logs, trials

__all__ = ["router"]

router = APIRouter(prefix="/api/v1", tags=["trials"])

Sort = Literal[
    "id", "-id", "state", "-state", "best_validation", "-best_validation",
    "latest_validation", "-latest_validation", "steps_completed", "-steps_completed",
    "restarts", "-restarts",
]  # fmt: skip


@router.get("/experiments/{experiment_id}/trials", responses=answer(TrialPage))
def list_trials(
    services: ServicesDep,
    connection: ReadDep,
    experiment_id: IdPath,
    state: Annotated[TrialState | None, Query()] = None,
    sort: Sort = "id",
    after: After = None,
    limit: Limit = 100,
) -> Response:
    """List an experiment's trials, the oldest first."""
    queries.one(connection, experiments, experiment_id)
    query = select(trials).where(trials.c.experiment_id == experiment_id)
    if state is not None:
        query = query.where(trials.c.state == state)
    rows, next_after = queries.page(connection, query, trials, PageRequest(sort, after, limit))
    found = [queries.trial(row, services.world.waiting) for row in rows]
    return respond(TrialPage(found, next_after))


@router.get("/trials/{trial_id}", responses=answer(TrialAnswer))
def get_trial(services: ServicesDep, connection: ReadDep, trial_id: IdPath) -> Response:
    """Read one trial."""
    row = queries.one(connection, trials, trial_id)
    return respond(TrialAnswer(queries.trial(row, services.world.waiting)))


@router.post("/trials/{trial_id}/kill", responses=answer(TrialAnswer))
async def kill_trial(services: ServicesDep, trial_id: IdPath) -> Response:
    """Stop one trial now; one that has ended stays as it is."""
    await services.write(
        lambda world, transaction: control.kill_trial(world, transaction, trial_id)
    )
    return await services.read(lambda found: get_trial(services, found, trial_id))


Group = Annotated[str | None, Query(max_length=200, description="training, validation, system.")]


@router.get("/trials/{trial_id}/metric-names", responses=answer(MetricNames))
def get_metric_names(connection: ReadDep, trial_id: IdPath, group: Group = None) -> Response:
    """List the metrics that a trial has reported."""
    queries.one(connection, trials, trial_id)
    found = queries.metric_names(connection, trial_id, group)
    return respond(MetricNames([MetricName(group=each[1], name=each[2]) for each in found]))


@router.get("/trials/{trial_id}/metrics", responses=answer(Metrics))
def get_metrics(
    connection: ReadDep,
    trial_id: IdPath,
    group: Group = None,
    names: Annotated[str | None, Query(max_length=2000, description="Separated by commas.")] = None,
    max_points: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    first: Annotated[int, Query(ge=0, le=MAX_STEP)] = 0,
    last: Annotated[int, Query(ge=0, le=MAX_STEP)] = MAX_STEP,
) -> Response:
    """Read curves; long ones as mean with the band of minimum and maximum, so no spike hides."""
    queries.one(connection, trials, trial_id)
    wanted = None if names is None else set(names.split(","))
    found = [
        read_curve(connection, trial_id, key, max_points, (first, last))
        for key in queries.metric_names(connection, trial_id, group)
        if wanted is None or key[2] in wanted
    ]
    return respond(Metrics([Curve(c.group, c.name, c.points, c.band) for c in found]))


_EXPORT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/x-ndjson": {}, "text/csv": {}}, "description": "Every point."}
}


@router.get(
    "/experiments/{experiment_id}/metrics/export",
    response_class=StreamingResponse,
    responses=_EXPORT,
)
async def export_metrics(
    services: ServicesDep,
    experiment_id: IdPath,
    format: Literal["ndjson", "csv"] = "ndjson",  # noqa: A002 - name of the query parameter
    group: Group = None,
) -> StreamingResponse:
    """Stream every metric point of an experiment."""
    await services.read(lambda connection: queries.one(connection, experiments, experiment_id))
    write = export_ndjson if format == "ndjson" else export_csv
    rows = write(services.database, experiment_id, group)
    media = {"ndjson": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}[format]
    name = f'attachment; filename="experiment-{experiment_id}.{format}"'
    headers = {"Content-Disposition": name}
    return ExportResponse(services.exports, rows, media_type=media, headers=headers)


CheckpointState = Literal["COMPLETED", "DELETED", "ERROR"]


def _checkpoints(
    connection: Connection, where: ColumnElement[bool], state: str | None, window: PageRequest
) -> Response:
    query = select(checkpoints).where(where)
    if state is not None:
        query = query.where(checkpoints.c.state == state)
    rows, next_after = queries.page(connection, query, checkpoints, window)
    found = queries.checkpoint_list(connection, rows)
    return respond(CheckpointPage(found, next_after))


@router.get(
    "/experiments/{experiment_id}/checkpoints",
    tags=["checkpoints"],
    responses=answer(CheckpointPage),
)
def list_experiment_checkpoints(
    connection: ReadDep,
    experiment_id: IdPath,
    state: CheckpointState | None = None,
    after: After = None,
    limit: Limit = 100,
) -> Response:
    """List an experiment's checkpoints, the oldest first."""
    queries.one(connection, experiments, experiment_id)
    where = checkpoints.c.experiment_id == experiment_id
    return _checkpoints(connection, where, state, PageRequest("id", after, limit))


@router.get(
    "/trials/{trial_id}/checkpoints", tags=["checkpoints"], responses=answer(CheckpointPage)
)
def list_trial_checkpoints(
    connection: ReadDep,
    trial_id: IdPath,
    state: CheckpointState | None = None,
    after: After = None,
    limit: Limit = 100,
) -> Response:
    """List a trial's checkpoints, the oldest first."""
    queries.one(connection, trials, trial_id)
    where = checkpoints.c.trial_id == trial_id
    return _checkpoints(connection, where, state, PageRequest("id", after, limit))


@router.get("/checkpoints/{uuid}", tags=["checkpoints"], responses=answer(CheckpointAnswer))
def get_checkpoint(connection: ReadDep, uuid: str) -> Response:
    """Read one checkpoint."""
    row = queries.one(connection, checkpoints, uuid)
    found = queries.checkpoint_list(connection, [row])[0]
    return respond(CheckpointAnswer(found))


def _log_filters(
    after: LineCursor = 0,
    limit: Limit = 1000,
    tail: Tail = None,
    level: Level | None = None,
    rank: Rank = None,
) -> dict[str, Any]:
    return {"after": after, "limit": limit, "tail": tail, "level": level, "rank": rank}


LogFilters = Annotated[dict[str, Any], Depends(_log_filters)]
"""Which log lines are wanted."""


def _logs(
    connection: Connection, where: ColumnElement[bool], wanted: Mapping[str, Any]
) -> Response:
    rows, next_after = queries.log_page(connection, where, wanted)
    return respond(LogPage([Log.of(row) for row in rows], next_after))


@router.get("/trials/{trial_id}/logs", tags=["logs"], responses=answer(LogPage))
def get_trial_logs(
    connection: ReadDep,
    trial_id: IdPath,
    wanted: LogFilters,
) -> Response:
    """Read a trial's log lines in the order in which they arrived."""
    queries.one(connection, trials, trial_id)
    where = logs.c.trial_id == trial_id
    return _logs(connection, where, wanted)


@router.get("/experiments/{experiment_id}/logs", tags=["logs"], responses=answer(LogPage))
def get_experiment_logs(
    connection: ReadDep,
    experiment_id: IdPath,
    wanted: LogFilters,
) -> Response:
    """Read the log lines of all trials of an experiment in the order in which they arrived."""
    queries.one(connection, experiments, experiment_id)
    where = logs.c.experiment_id == experiment_id
    return _logs(connection, where, wanted)
