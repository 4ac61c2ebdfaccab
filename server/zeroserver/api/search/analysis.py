"""What the trials of an experiment tell together."""

import math
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from sqlalchemy import select

from zerolab.contract.wire import wire_number
from zeroserver.analysis.best import best_so_far
from zeroserver.analysis.choice import check_columns, conditions, kept
from zeroserver.analysis.columns import (
    COLUMNS,
    PREFIX,
    Row,
    Value,
    cell_of,
    measured_of_best,
    names,
    no_metric,
    read_rows,
    refuse,
)
from zeroserver.analysis.importance import METHOD
from zeroserver.api import queries
from zeroserver.api.common import IdPath, Where, answer
from zeroserver.api.reading import ReadingRoute
from zeroserver.api.resources import (
    ExperimentColumns,
    HparamShare,
    Importance,
    Improvement,
    MetricName,
    SearchProgress,
    TrialColumns,
)
from zeroserver.api.rows import iso, respond
from zeroserver.services import ReadDep, ServicesDep
from zeroserver.store.schema import experiments

__all__ = ["router"]

router = APIRouter(prefix="/api/v1/experiments", tags=["analysis"], route_class=ReadingRoute)


@router.get("/columns", responses=answer(ExperimentColumns))
def get_experiment_columns(
    connection: ReadDep,
    column: Annotated[
        list[str] | None,
        Query(
            max_length=100,
            description="`id` (is always there), and metrics as `max.validation.accuracy`.",
        ),
    ] = None,
) -> Response:
    """Read metrics of all experiments, each one's best trial standing for it."""
    measures = {name: measured_of_best(connection, name) for name in column or () if name != "id"}
    refuse([no_metric(name, "column") for name, found in measures.items() if found is None])
    ids = connection.execute(select(experiments.c.id).order_by(experiments.c.id)).scalars().all()
    cells = {name: _told(map((found or {}).get, ids)) for name, found in measures.items()}
    named = [MetricName(*each) for each in queries.all_metric_names(connection)]
    return respond(ExperimentColumns(named, {"id": list(ids), **cells}))


@router.get("/{experiment_id}/columns", responses=answer(TrialColumns))
def get_columns(
    services: ServicesDep,
    connection: ReadDep,
    experiment_id: IdPath,
    where: Where = None,
    column: Annotated[
        list[str] | None, Query(max_length=100, description="Only these; all if none is named.")
    ] = None,
) -> Response:
    """Read the trials of an experiment as columns: hyperparameters, metrics, cost."""
    queries.one(connection, experiments, experiment_id)
    wanted = conditions(where)
    needed = {*(column or COLUMNS), *(each[0] for each in wanted)}
    rows = read_rows(connection, experiment_id, services.world.clock(), needed)
    shown = column or [*COLUMNS, *(PREFIX + name for name in names(rows))]
    check_columns(rows, wanted, shown, "column")
    found = kept(rows, wanted)
    return respond(TrialColumns({name: _cells(found, name) for name in shown}))


def _cells(rows: list[Row], column: str) -> list[Any]:
    return _told(map(cell_of(column), rows))


def _told(values: Iterable[Value]) -> list[Any]:
    return [
        wire_number(value) if isinstance(value, float) and not math.isfinite(value) else value
        for value in values
    ]


@router.get("/{experiment_id}/search-progress", responses=answer(SearchProgress))
def get_search_progress(connection: ReadDep, experiment_id: IdPath) -> Response:
    """Read how the best value came down, or up, over time."""
    row = queries.one(connection, experiments, experiment_id)
    better, validations = best_so_far(
        connection, experiment_id, smaller_is_better=bool(row["smaller_is_better"])
    )
    found = [Improvement(iso(b.time) or "", b.trial_id, b.length, b.value) for b in better]
    return respond(SearchProgress(found, validations))


@router.get("/{experiment_id}/importance", responses=answer(Importance))
def get_importance(services: ServicesDep, connection: ReadDep, experiment_id: IdPath) -> Response:
    """Find out which hyperparameters matter for the searcher's metric; kept until trials change."""
    row = queries.one(connection, experiments, experiment_id)
    rows = read_rows(connection, experiment_id)
    found = services.importances.of(
        experiment_id, rows, smaller_is_better=bool(row["smaller_is_better"])
    )
    shares = [HparamShare(*share) for share in found.shares]
    return respond(Importance(METHOD, found.trials, found.explained, shares, found.problem))
