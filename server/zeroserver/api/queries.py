"""Database queries of the REST API: keyset pagination, and no query in a loop."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    func,
    or_,
    select,
)

from zerolab.contract.outcome import is_failure
from zerolab.contract.secrets import mask_secrets
from zerolab.errors import ConfigError
from zeroserver.analysis.cost import slot_seconds_of
from zeroserver.analysis.missing_result import experiment_problem, trial_problem
from zeroserver.analysis.trial_filter import read_cursor, write_cursor
from zeroserver.api.resources import Checkpoint, Experiment, Run, Trial
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import TrialState
from zeroserver.store.database import raw_rows
from zeroserver.store.points import SHIFTS, json_number
from zeroserver.store.rows import (
    CheckpointRow,
    ExperimentRow,
    LogRow,
    Row,
    RunRow,
    TrialRow,
    find_row,
    read_rows,
)
from zeroserver.store.schema import (
    agents,
    checkpoints,
    logs,
    metric_keys,
    points,
    rollups,
    run_nodes,
    runs,
    trials,
)

__all__ = [
    "PageRequest",
    "checkpoint_list",
    "checkpoint_metrics",
    "count_trials",
    "experiment",
    "log_page",
    "metric_names",
    "owned",
    "page",
    "rows_of",
    "runs_of",
    "trial_list",
]

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def owned(
    connection: Connection, table: Table, owners: type[Row], owner_id: int
) -> ColumnElement[bool]:
    """Return the condition for the rows of an experiment or trial.

    Raises:
        NotFoundError: If there is no such owner.
    """
    find_row(connection, owners, owner_id)
    owner: ColumnElement[int] = table.c[f"{owners.table.name.removesuffix('s')}_id"]
    return owner == owner_id


R = TypeVar("R", bound=ExperimentRow | TrialRow | CheckpointRow)


class PageRequest(NamedTuple):
    """Order, cursor and length of a page."""

    sort: str
    """Column; a leading ``-`` sorts in descending order. Rows without a value come last."""
    after: str | None
    """Cursor from the previous page."""
    limit: int
    """Maximum number of rows."""


def page(
    connection: Connection,
    kind: type[R],
    query: Select[Any],
    page_request: PageRequest,
    only: Collection[int] | None = None,
) -> tuple[list[R], str | None]:
    """Return a page of rows and the cursor of the next page.

    Args:
        connection: Database connection.
        kind: Type of the rows; their ``id`` breaks ties.
        query: Query over the table, without an order.
        page_request: Order, start and length of the page.
        only: Ids of the rows to consider; None for all.

    Raises:
        ConfigError: If the cursor does not fit the order.
    """
    sort, after, limit = page_request
    descending, name = sort.startswith("-"), sort.removeprefix("-")
    column, row_id = kind.table.c[name], kind.table.c.id
    if after is not None:
        query = query.where(_behind(column, row_id, after, descending=descending))
    by_id = row_id.desc() if descending else row_id.asc()
    if name == "id":
        query = query.order_by(by_id)
    else:
        ordered = column.desc() if descending else column.asc()
        query = query.order_by(ordered.nulls_last(), by_id)
    if only is None:
        fetched = read_rows(connection, kind, query.limit(limit + 1))
    else:  # too many ids for an IN clause: filter the streamed rows
        with connection.execute(query.with_only_columns(row_id)) as result:
            ids = [*islice(filter(only.__contains__, result.scalars()), limit + 1)]
        fetched = rows_of(connection, kind, ids)
    rows = fetched[:limit]
    if len(fetched) <= limit:
        return rows, None
    last = rows[-1]
    return rows, str(last.id) if name == "id" else write_cursor(getattr(last, name), last.id)


def _behind(
    column: Column[Any], row_id: Column[Any], after: str, *, descending: bool
) -> ColumnElement[bool]:
    def beyond(key: Column[Any], value: Any) -> ColumnElement[bool]:
        condition: ColumnElement[bool] = key < value if descending else key > value
        return condition

    value, last_id = read_cursor(f"[null,{after}]" if column is row_id else after)
    if column is row_id:
        return beyond(row_id, last_id)
    if value is not None and not isinstance(value, column.type.python_type | int):
        raise ConfigError("request", [f"after: does not fit this order, got {after[:100]!r}"])
    # Keyset pagination instead of OFFSET: the index finds any page at once, and rows added or
    # removed in between neither repeat nor hide others. The id breaks ties. Rows without a value
    # come last in both directions.
    if value is None:
        return and_(column.is_(None), beyond(row_id, last_id))
    is_tie = and_(column == value, beyond(row_id, last_id))
    return or_(beyond(column, value), is_tie, column.is_(None))


def experiment(row: ExperimentRow, orchestrator: Orchestrator) -> Experiment:
    """Convert a row to a resource, with its owner, and the reason if it waits."""
    return Experiment.of(
        row,
        owner=orchestrator.users.shown_owner(row.owner_id),
        project=orchestrator.projects.shown_name(row.project_id),
        config=_masked_config(row.config),
        waiting_reason=orchestrator.queue.waiting.of_experiment(row.id, row.state),
        result_problem=experiment_problem(row),
        unread_hparams=msgspec.json.decode(row.unread_hparams or b"[]"),
    )


_PAUSED = str(TrialState.PAUSED)


@lru_cache(maxsize=256)  # experiments are read often, configurations change rarely
def _masked_config(stored: str) -> msgspec.Raw:
    """Return a stored configuration as JSON, masked because old versions stored secrets."""
    return msgspec.Raw(msgspec.json.encode(mask_secrets(msgspec.json.decode(stored))))


def count_trials(
    connection: Connection,
    experiment_id: int,
    column_values: Mapping[str, str | int],
    only: Collection[int] | None,
) -> int:
    """Count the trials of an experiment with the given column values.

    Args:
        connection: Database connection.
        experiment_id: Id of the experiment.
        column_values: Required value of each column.
        only: Ids of the trials to consider; None for all.
    """
    if only is not None:
        return len(trials_with(connection, experiment_id, column_values).intersection(only))
    return int(_of_trials(connection, "count(*)", experiment_id, column_values)[0][0])


def trials_with(
    connection: Connection, experiment_id: int, column_values: Mapping[str, str | int]
) -> frozenset[int]:
    """Return the ids of an experiment's trials with the given column values."""
    rows = _of_trials(connection, "id", experiment_id, column_values)
    return frozenset(trial_id for (trial_id,) in rows)


def _of_trials(
    connection: Connection,
    selection: str,
    experiment_id: int,
    column_values: Mapping[str, str | int],
) -> Sequence[Any]:
    conditions = "".join(f" AND {name} = ?" for name in column_values)
    query = f"SELECT {selection} FROM trials WHERE experiment_id = ?{conditions}"  # noqa: S608 - our own names
    return raw_rows(connection, query, (experiment_id, *column_values.values()))


def rows_of(connection: Connection, kind: type[R], ids: Sequence[int]) -> list[R]:
    """Return rows of a table in the order of ``ids``, by one query."""
    query = select(kind.table.c.id, kind.table).where(kind.table.c.id.in_(ids))
    by_id = {row_id: kind(*row) for row_id, *row in connection.execute(query)}
    return [by_id[row_id] for row_id in ids if row_id in by_id]


def trial_list(
    connection: Connection, rows: Sequence[TrialRow], orchestrator: Orchestrator
) -> list[Trial]:
    """Convert rows to resources, with two more queries for cost and the searcher's metric.

    Args:
        connection: Database connection.
        rows: Rows of the table of trials.
        orchestrator: Provides the clock and the reasons why trials wait.
    """
    costs = slot_seconds_of(connection, [row.id for row in rows], orchestrator.clock())
    owners = tuple({row.experiment_id for row in rows})
    query = _METRICS.format(", ".join("?" * len(owners)) or "NULL")
    metrics: dict[int, str] = dict(raw_rows(connection, query, owners))
    of_trial = orchestrator.queue.waiting.of_trial
    result = []
    for row in rows:
        number, experiment_id, state, error = (
            row.id,
            row.experiment_id,
            row.state,
            row.error,
        )
        # A trial paused by its searcher shows an error of its script as the reason.
        waiting = (
            error
            if error and state == _PAUSED
            else of_trial(number, experiment_id, state, row.run_id)
        )
        result.append(
            Trial.of(
                row,
                slot_seconds=costs.get(number, 0.0),
                waiting_reason=waiting,
                error=None if state == _PAUSED else error,
                result_problem=trial_problem(row, metrics.get(experiment_id, "")),
            )
        )
    return result


_METRICS = "SELECT id, metric FROM experiments WHERE id IN ({})"


def runs_of(connection: Connection, trial_id: int) -> list[Run]:
    """Return the runs of a trial, oldest first, by two queries."""
    of_trial = runs.c.trial_id == trial_id
    agent = func.coalesce(run_nodes.c.agent_id, runs.c.agent_id)
    agent_names = (
        select(runs.c.id, agents.c.name)
        .select_from(runs)
        .outerjoin(run_nodes, run_nodes.c.run_id == runs.c.id)
        .join(agents, agents.c.id == agent)
        .where(of_trial)
        .order_by(runs.c.id, run_nodes.c.node_rank)
    )
    names: dict[int, list[str]] = {}
    for run_id, name in connection.execute(agent_names):
        names.setdefault(run_id, []).append(name)
    rows = read_rows(connection, RunRow, select(runs).where(of_trial).order_by(runs.c.id))
    return [
        Run.of(row, agents=names.get(row.id, []), failed=is_failure(row.exit_code or 0))
        for row in rows
    ]


def checkpoint_list(connection: Connection, rows: Sequence[Any]) -> list[Checkpoint]:
    """Convert rows to resources with the validation metrics at their steps, by one more query."""
    metrics = checkpoint_metrics(connection, [row.uuid for row in rows])
    return [Checkpoint.of(row, metrics=metrics.get(row.uuid)) for row in rows]


def checkpoint_metrics(
    connection: Connection, uuids: Sequence[str]
) -> dict[str, dict[str, float | str]]:
    """Return the validation metrics at the step of each checkpoint, by one query."""
    metrics: dict[str, dict[str, float | str]] = {}
    query = (
        select(checkpoints.c.uuid, metric_keys.c.name, points.c.value)
        .select_from(checkpoints)
        .join(metric_keys, metric_keys.c.group_name == "validation")
        .join(
            points,
            and_(
                points.c.trial_id == checkpoints.c.trial_id,
                points.c.key_id == metric_keys.c.id,
                points.c.step == checkpoints.c.steps_completed,
            ),
        )
        .where(checkpoints.c.uuid.in_(uuids))
    )
    for uuid, name, value in connection.execute(query):
        metrics.setdefault(uuid, {})[name] = json_number(value)
    return metrics


def metric_names(
    connection: Connection, trial_id: int, group: str | None = None
) -> list[tuple[int, str, str]]:
    """Return id, group and name of every metric that a trial has reported."""
    reported = (
        select(rollups.c.key_id)
        .where(rollups.c.trial_id == trial_id, rollups.c.shift == SHIFTS[-1])
        .distinct()
    )
    columns = metric_keys.c
    query = select(columns.id, columns.group_name, columns.name).where(columns.id.in_(reported))
    if group is not None:
        query = query.where(columns.group_name == group)
    query = query.order_by(columns.group_name, columns.name)
    return [(key.id, key.group_name, key.name) for key in connection.execute(query)]


def all_metric_names(
    connection: Connection, experiment_ids: Collection[int] | None = None
) -> list[tuple[str, str]]:
    """Return group and name of every metric that was ever reported, or by some experiments."""
    columns = metric_keys.c
    query = select(columns.group_name, columns.name).order_by(columns.group_name, columns.name)
    if experiment_ids is not None:
        of_experiments = select(trials.c.id).where(trials.c.experiment_id.in_(experiment_ids))
        reported = select(rollups.c.key_id).where(
            rollups.c.trial_id.in_(of_experiments), rollups.c.shift == SHIFTS[-1]
        )
        query = query.where(columns.id.in_(reported))
    return [(key.group_name, key.name) for key in connection.execute(query)]


def log_page(
    connection: Connection,
    condition: ColumnElement[bool],
    filters: Mapping[str, Any],
) -> tuple[Sequence[LogRow], int | None]:
    """Return log lines in the order of arrival, and the cursor of the next page.

    Args:
        connection: Database connection.
        condition: Condition that selects the owner's lines.
        filters: ``after`` (id of a line) and ``limit``; ``tail`` for the last lines instead;
            ``level`` for the minimum level; ``rank``.
    """
    query = select(logs).where(condition)
    if filters.get("rank") is not None:
        query = query.where(logs.c.rank == filters["rank"])
    level = filters.get("level")
    if level is not None and level != LEVELS[0]:
        has_level = logs.c.level.in_(LEVELS[LEVELS.index(level) :])
        query = query.where(
            or_(has_level, logs.c.level.is_(None)) if level == "INFO" else has_level
        )
    limit = filters["limit"]
    if filters.get("tail") is not None:
        last = query.order_by(logs.c.id.desc()).limit(filters["tail"])
        return read_rows(connection, LogRow, last)[::-1], None
    query = query.where(logs.c.id > filters["after"]).order_by(logs.c.id).limit(limit + 1)
    fetched = read_rows(connection, LogRow, query)
    return fetched[:limit], fetched[limit - 1].id if len(fetched) > limit else None
