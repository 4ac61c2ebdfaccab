"""Routes for the analysis of the trials of an experiment."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, cast

from fastapi import Query
from sqlalchemy import Connection, select

from zeroserver.access.principal import PrincipalDep
from zeroserver.access.routes import ACCESS, SHARED, shown
from zeroserver.analysis.columns import (
    COLUMNS,
    PREFIX,
    Row,
    Value,
    best_trial_metric,
    cell_reader,
    names,
    no_metric,
    raise_problems,
    read_columns,
    read_rows,
    to_json_value,
)
from zeroserver.analysis.trial_filter import check_columns, conditions, matching_rows
from zeroserver.api import queries
from zeroserver.api.common import IdPath, Where
from zeroserver.api.resources import MetricName
from zeroserver.api.rows import iso
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.analysis.best import best_so_far
from zeroserver.extensions.analysis.importance import (
    METHOD,
    ImportanceCache,
    ImportanceResult,
    importance,
    trials_fingerprint,
)
from zeroserver.extensions.analysis.resources import (
    ExperimentColumns,
    HparamShare,
    Importance,
    Improvement,
    SearchProgress,
    TrialColumns,
)
from zeroserver.services import Services, ServicesDep
from zeroserver.store.rows import ExperimentRow, find_row
from zeroserver.store.schema import experiments

__all__ = ["router"]

ACCESS.update(
    {
        "GET /api/v1/experiments/columns": SHARED,
        "GET /api/v1/experiments/{experiment_id}/columns": shown("experiment"),
        "GET /api/v1/experiments/{experiment_id}/importance": shown("experiment"),
        "GET /api/v1/experiments/{experiment_id}/search-progress": shown("experiment"),
    }
)

router = resource_router("/api/v1/experiments", "analysis")


@router.get("/columns")
async def get_experiment_columns(
    services: ServicesDep,
    principal: PrincipalDep,
    column: Annotated[
        list[str] | None,
        Query(
            max_length=100,
            description="`id` (always included), or metrics such as `max.validation.accuracy`.",
        ),
    ] = None,
) -> ExperimentColumns:
    """Read metrics of the best trials of all experiments, or of those of a share link."""
    shown_ids = principal.experiment_ids if principal.kind == "share" else None

    def read(connection: Connection) -> ExperimentColumns:
        named = queries.all_metric_names(connection, shown_ids)
        reported = {f"{group}.{name}" for group, name in named}
        measures = {
            name: best_trial_metric(connection, name)
            if name.partition(".")[2] in reported
            else None
            for name in column or ()
            if name != "id"
        }
        raise_problems(
            [no_metric(name, "column") for name, values in measures.items() if values is None]
        )
        query = select(experiments.c.id).order_by(experiments.c.id)
        if shown_ids is not None:
            query = query.where(experiments.c.id.in_(shown_ids))
        ids = connection.execute(query).scalars().all()
        cells = {
            name: _json_values(map((values or {}).get, ids)) for name, values in measures.items()
        }
        metric_list = [MetricName(*row) for row in named]
        return ExperimentColumns(metric_list, {"id": list(ids), **cells})

    return await services.read(read)


@router.get("/{experiment_id}/columns")
async def get_columns(
    services: ServicesDep,
    experiment_id: IdPath,
    where: Where = None,
    column: Annotated[
        list[str] | None, Query(max_length=100, description="Columns to return; default: all.")
    ] = None,
) -> TrialColumns:
    """Read the trials of an experiment as columns of hyperparameters, metrics and cost."""

    def read(connection: Connection) -> TrialColumns:
        find_row(connection, ExperimentRow, experiment_id)
        filters = conditions(where)
        if not filters:
            columns = _whole(services, connection, experiment_id, column)
            if columns is not None:
                return TrialColumns(columns)
        needed = {*(column or COLUMNS), *(condition[0] for condition in filters)}
        leaves = services.orders.leaves(connection, experiment_id)
        rows = read_rows(connection, experiment_id, services.orchestrator.clock(), needed, leaves)
        shown = column or [*COLUMNS, *(PREFIX + name for name in names(rows))]
        check_columns(rows, filters, shown, "column")
        holding = matching_rows(rows, filters)
        return TrialColumns({name: _cells(holding, name) for name in shown})

    return await services.read(read)


def _whole(
    services: Services, connection: Connection, experiment_id: int, column: Sequence[str] | None
) -> dict[str, Any] | None:
    """Read columns of all trials, with cached JSON of hyperparameters.

    Returns:
        Cells by column; None if a column is unknown, or trials were created or deleted
        concurrently.
    """
    plain = [name for name in column or COLUMNS if not name.startswith(PREFIX)]
    now = services.orchestrator.clock()
    read = read_columns(connection, experiment_id, now, plain)
    if read is None:
        return None
    hparams = [name.removeprefix(PREFIX) for name in column or () if name.startswith(PREFIX)]
    encoded = services.orders.columns(
        connection, experiment_id, cast("list[int]", read["id"]), hparams if column else None
    )
    if encoded is None:
        return None
    cells: dict[str, Any] = {name: _json_values(read[name]) for name in plain}
    cells |= {PREFIX + name: raw for name, raw in encoded.items()}
    return {name: cells[name] for name in column or cells}


def _cells(rows: list[Row], column: str) -> list[Any]:
    return _json_values(map(cell_reader(column), rows))


def _json_values(values: Iterable[Value]) -> list[Any]:
    return [to_json_value(value) for value in values]


@router.get("/{experiment_id}/search-progress")
async def get_search_progress(services: ServicesDep, experiment_id: IdPath) -> SearchProgress:
    """Read the improvements of the best value over time."""

    def read(connection: Connection) -> SearchProgress:
        row = find_row(connection, ExperimentRow, experiment_id)
        better, validations = best_so_far(
            connection, experiment_id, smaller_is_better=bool(row.smaller_is_better)
        )
        improvements = [
            Improvement(iso(b.time) or "", b.trial_id, b.length, b.value) for b in better
        ]
        return SearchProgress(improvements, validations)

    return await services.read(read)


@router.get("/{experiment_id}/importance")
async def get_importance(services: ServicesDep, experiment_id: IdPath) -> Importance:
    """Read the importance of hyperparameters for the searcher's metric, from a cache."""

    def read_state(connection: Connection) -> tuple[bool, int]:
        row = find_row(connection, ExperimentRow, experiment_id)
        return bool(row.smaller_is_better), trials_fingerprint(connection, experiment_id)

    smaller_is_better, state = await services.read(read_state)

    def compute() -> ImportanceResult:
        with services.database.read() as connection:
            leaves = services.orders.leaves(connection, experiment_id)
            rows = read_rows(
                connection,
                experiment_id,
                requested=("best_validation",),
                leaves=leaves,
            )
        return importance(rows, smaller_is_better=smaller_is_better)

    result = await services.part(ImportanceCache).of(experiment_id, state, compute)
    shares = [HparamShare(*share) for share in result.shares]
    return Importance(METHOD, result.trials, result.explained, shares, result.problem)
