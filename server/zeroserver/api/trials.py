"""Routes of trials, their metrics and logs."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, Query, Response
from sqlalchemy import Connection, select

from zerolab.contract.secrets import restore_secrets
from zeroserver.access.principal import PrincipalDep
from zeroserver.analysis.columns import COLUMNS, COMPUTED, PREFIX, read_rows
from zeroserver.analysis.trial_filter import choose, conditions
from zeroserver.api import queries
from zeroserver.api.common import (
    After,
    IdPath,
    Level,
    Limit,
    LineCursor,
    Rank,
    Tail,
    Where,
    Whole,
)
from zeroserver.api.experiments import Changes, overlay, submit_again
from zeroserver.api.queries import PageRequest
from zeroserver.api.resources import (
    Curve,
    ExperimentAnswer,
    Log,
    LogPage,
    MetricName,
    MetricNames,
    Metrics,
    RunPage,
    TrialAnswer,
    TrialPage,
)
from zeroserver.api.strict_route import resource_router
from zeroserver.orchestrator.search.search_service import has_grown
from zeroserver.orchestrator.state import config_of
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services, ServicesDep
from zeroserver.states import EXPERIMENT_ENDED, TrialState
from zeroserver.store.points import MAX_STEP, point_times, read_curve, thinned_keys
from zeroserver.store.rows import ExperimentRow, Row, TrialRow, find_row
from zeroserver.store.schema import logs, trials

__all__ = ["router"]

_STORED = frozenset(COLUMNS) - COMPUTED
"""Columns that the database sorts by."""

router = resource_router("/api/v1", "trials")

Sort = Annotated[
    str,
    Query(
        max_length=500,
        description="A column or `hparams.NAME`; `-` sorts in descending order; `metric`: best "
        "first.",
    ),
]


@router.get("/experiments/{experiment_id}/trials")
async def list_trials(
    services: ServicesDep,
    experiment_id: IdPath,
    state: Annotated[TrialState | None, Query()] = None,
    archived: bool | None = None,
    where: Where = None,
    sort: Sort = "id",
    after: After = None,
    limit: Limit = 100,
) -> TrialPage:
    """List an experiment's trials, oldest first or by any column."""

    def read(connection: Connection) -> TrialPage:
        experiment = find_row(connection, ExperimentRow, experiment_id)
        order = sort
        if order == "metric":
            order = "best_validation" if experiment.smaller_is_better else "-best_validation"
        filters, column = conditions(where), order.removeprefix("-")
        started_with = all(condition[0].startswith(PREFIX) for condition in filters)
        column_values: dict[str, str | int] = {}
        if state is not None:
            column_values["state"] = state.value
        if archived is not None:
            column_values["archived"] = int(archived)
        if started_with and column in _STORED:
            only = services.orders.holding(connection, experiment_id, filters) if filters else None
            total = experiment.num_trials if only is None else len(only)
            if column_values:
                total = queries.count_trials(connection, experiment_id, column_values, only)
            column_values["experiment_id"] = experiment_id
            page_request = PageRequest(order, after, limit)
            query = select(trials).where(
                *(trials.c[name] == value for name, value in column_values.items())
            )
            rows_of_page, next_after = queries.page(connection, TrialRow, query, page_request, only)
        else:
            if started_with and column.startswith(PREFIX):
                only = (
                    queries.trials_with(connection, experiment_id, column_values)
                    if column_values
                    else None
                )
                selected = services.orders.choose(
                    connection, experiment_id, order, after, limit, conditions=filters, only=only
                )
            else:
                filters += [(name, "=", value) for name, value in column_values.items()]
                needed = {column, *(condition[0] for condition in filters)}
                rows = read_rows(connection, experiment_id, services.orchestrator.clock(), needed)
                selected = choose(rows, filters, order, after, limit)
            rows_of_page = queries.rows_of(connection, TrialRow, selected.ids)
            next_after, total = selected.next_after, selected.total
        shown = queries.trial_list(connection, rows_of_page, services.orchestrator)
        return TrialPage(shown, next_after, total)

    return await services.read(read)


@router.get("/trials/{trial_id}")
async def get_trial(services: ServicesDep, trial_id: IdPath) -> TrialAnswer:
    """Read one trial."""

    def read(connection: Connection) -> TrialAnswer:
        row = find_row(connection, TrialRow, trial_id)
        return TrialAnswer(queries.trial_list(connection, [row], services.orchestrator)[0])

    return await services.read(read)


async def _prepare_searcher(services: Services, trial_id: int) -> None:
    """Replay the search of a trial before the writer's transaction needs it."""

    def read_state(connection: Connection) -> tuple[int, bool, bool]:
        home = find_row(connection, TrialRow, trial_id).experiment_id
        ended = find_row(connection, ExperimentRow, home).state in EXPERIMENT_ENDED
        return home, ended, ended and has_grown(connection, home)

    experiment_id, ended, replays = await services.read(read_state)
    if not ended:
        await services.load_searcher(experiment_id)
    elif replays:
        await services.prepare_replay(experiment_id)


@router.get("/trials/{trial_id}/runs")
async def get_runs(services: ServicesDep, trial_id: IdPath) -> RunPage:
    """List the runs of a trial, with agents, times and outcomes."""

    def read(connection: Connection) -> RunPage:
        find_row(connection, TrialRow, trial_id)
        return RunPage(queries.runs_of(connection, trial_id))

    return await services.read(read)


@router.post("/trials/{trial_id}/continue")
async def continue_trial(services: ServicesDep, trial_id: IdPath) -> TrialAnswer:
    """Continue a failed or stopped trial from its checkpoint."""
    await _prepare_searcher(services, trial_id)
    await services.write(lambda work: work.continuations.continue_trial(trial_id))
    return await get_trial(services, trial_id)


@router.post("/trials/{trial_id}/fork", status_code=201)
async def fork_trial(
    services: ServicesDep,
    principal: PrincipalDep,
    trial_id: IdPath,
    fork: Changes | None = None,
) -> ExperimentAnswer:
    """Fork a trial: submit a new experiment that starts from its weights."""
    fork = fork or Changes()
    trial = await services.read(lambda connection: find_row(connection, TrialRow, trial_id))
    experiment_id = trial.experiment_id
    original = await services.read(
        lambda connection: find_row(connection, ExperimentRow, experiment_id)
    )
    submitted = msgspec.json.decode(original.raw_config)
    raw = restore_secrets(overlay(_single_trial_config(original, trial), fork.config), submitted)
    return await submit_again(services, principal, original, raw, activate=fork.activate)


def _single_trial_config(original: ExperimentRow, trial: TrialRow) -> dict[str, Any]:
    """Return the configuration of an experiment that consists of one of its trials."""
    raw: dict[str, Any] = msgspec.json.decode(original.raw_config)
    searcher = config_of(original).searcher
    length = searcher.full_length
    raw["searcher"] = {
        "name": "single",
        "metric": searcher.metric,
        "smaller_is_better": searcher.smaller_is_better,
        **({"max_length": length.model_dump(mode="json")} if length is not None else {}),
        "source_trial_id": trial.id,
    }
    raw["hyperparameters"] = msgspec.json.decode(trial.hparams)
    return raw


@router.delete("/trials/{trial_id}", status_code=204)
async def delete_trial(services: ServicesDep, trial_id: IdPath) -> Response:
    """Delete a trial of an ended experiment, with its metrics, logs and checkpoints."""

    def job(work: UnitOfWork) -> bool:
        return work.trials.remove(trial_id)

    while not await services.write(job):  # other jobs may run in between
        services.database.deleted = True
    services.database.deleted = True
    await services.remove_orphans()
    return Response(status_code=204)


TrialAction = Literal["pause", "activate", "cancel", "kill", "archive", "unarchive"]


@router.post("/trials/{trial_id}/{action}")
async def act_on_trial(services: ServicesDep, trial_id: IdPath, action: TrialAction) -> TrialAnswer:
    """Pause, activate, cancel, kill, archive or unarchive a trial; idempotent."""
    if action not in {"archive", "unarchive"}:
        await _prepare_searcher(services, trial_id)
    await services.write(lambda work: work.trials.act(trial_id, action))
    return await get_trial(services, trial_id)


Group = Annotated[str | None, Query(max_length=200, description="training, validation, system.")]


@router.get("/trials/{trial_id}/metric-names")
async def get_metric_names(
    services: ServicesDep, trial_id: IdPath, group: Group = None
) -> MetricNames:
    """List the metrics that a trial has reported."""

    def read(connection: Connection) -> MetricNames:
        find_row(connection, TrialRow, trial_id)
        keys = queries.metric_names(connection, trial_id, group)
        return MetricNames([MetricName(group=key[1], name=key[2]) for key in keys])

    return await services.read(read)


@router.get("/trials/{trial_id}/metrics")
async def get_metrics(
    services: ServicesDep,
    trial_id: IdPath,
    group: Group = None,
    names: Annotated[str | None, Query(max_length=2000, description="Separated by commas.")] = None,
    max_points: Annotated[Whole, Query(ge=1, le=10_000)] = 1000,
    first: Annotated[Whole, Query(ge=0, le=MAX_STEP)] = 0,
    last: Annotated[Whole, Query(ge=0, le=MAX_STEP)] = MAX_STEP,
    times: Annotated[bool, Query(description="Return the time of each point.")] = False,
) -> Metrics:
    """Read metric curves; long ones are down-sampled to mean, minimum and maximum."""

    def read(connection: Connection) -> Metrics:
        find_row(connection, TrialRow, trial_id)
        thinned = thinned_keys(connection, trial_id)
        requested = None if names is None else set(names.split(","))
        curves = []
        for key in queries.metric_names(connection, trial_id, group):
            if requested is not None and key[2] not in requested:
                continue
            is_thinned = key[0] in thinned
            within = (first, last)
            curve = read_curve(connection, trial_id, key, max_points, within, thinned=is_thinned)
            steps = [point[0] for point in curve.points]
            reported_at = point_times(connection, trial_id, key[0], steps) if times else None
            curves.append(
                Curve(
                    curve.group, curve.name, curve.points, curve.band, reported_at, is_thinned
                )
            )  # fmt: skip
        return Metrics(curves)

    return await services.read(read)


async def _log_filters(
    after: LineCursor = 0,
    limit: Limit = 1000,
    tail: Tail = None,
    level: Level | None = None,
    rank: Rank = None,
) -> dict[str, Any]:
    return {"after": after, "limit": limit, "tail": tail, "level": level, "rank": rank}


LogFilters = Annotated[dict[str, Any], Depends(_log_filters)]
"""Filters of log lines."""


def _logs(
    connection: Connection, owners: type[Row], owner_id: int, filters: Mapping[str, Any]
) -> LogPage:
    owned = queries.owned(connection, logs, owners, owner_id)
    rows, next_after = queries.log_page(connection, owned, filters)
    return LogPage([Log.of(row) for row in rows], next_after)


@router.get("/trials/{trial_id}/logs", tags=["logs"])
async def get_trial_logs(services: ServicesDep, trial_id: IdPath, filters: LogFilters) -> LogPage:
    """Read a trial's log lines in the order of arrival."""
    return await services.read(lambda connection: _logs(connection, TrialRow, trial_id, filters))


@router.get("/experiments/{experiment_id}/logs", tags=["logs"])
async def get_experiment_logs(
    services: ServicesDep, experiment_id: IdPath, filters: LogFilters
) -> LogPage:
    """Read the log lines of all trials of an experiment in the order of arrival."""
    return await services.read(
        lambda connection: _logs(connection, ExperimentRow, experiment_id, filters)
    )
