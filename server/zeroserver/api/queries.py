"""Reading for the windows: pages by keyset, never by offset; no query in a loop."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    Table,
    and_,
    func,
    or_,
    select,
)

from zerolab.contract.wire import wire_number
from zerolab.errors import ConfigError, NotFoundError
from zeroserver.api.resources import Agent, Checkpoint, Experiment, Job, Slot, Trial
from zeroserver.api.results import experiment_problem, trial_problem
from zeroserver.orchestrator.waiting import Waiting
from zeroserver.states import EXPERIMENT_ENDED, RunState
from zeroserver.store.points import SHIFTS
from zeroserver.store.schema import (
    agents,
    checkpoints,
    experiments,
    logs,
    metric_keys,
    points,
    rollups,
    runs,
    trials,
)

__all__ = [
    "PageRequest",
    "agent_list",
    "checkpoint_list",
    "experiment",
    "jobs",
    "log_page",
    "metric_names",
    "one",
    "page",
    "trial",
]

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def one(connection: Connection, table: Table, row_id: int | str) -> RowMapping:
    """Return one row, by id (checkpoints: by uuid).

    Raises:
        NotFoundError: If there is none.
    """
    column = table.c.uuid if isinstance(row_id, str) else table.c.id
    row = connection.execute(select(table).where(column == row_id)).mappings().one_or_none()
    if row is None:
        msg = f"there is no {table.name.removesuffix('s')} {row_id}"
        raise NotFoundError(msg)
    return row


class PageRequest(NamedTuple):
    """Which rows of a list are wanted."""

    sort: str
    """A column, ``-`` before it for the largest first; rows without a value come last."""
    after: str | None
    """Cursor that the page before gave."""
    limit: int
    """Most rows."""


def page(
    connection: Connection, query: Select[Any], table: Table, window: PageRequest
) -> tuple[Sequence[RowMapping], str | None]:
    """Return a page of rows and the cursor of the next page.

    Args:
        connection: For reading.
        query: Over ``table``, without an order.
        table: With a column ``id``, which breaks ties.
        window: Order, start and length of the page.

    Raises:
        ConfigError: If the cursor is not one of this order.
    """
    sort, after, limit = window
    descending, name = sort.startswith("-"), sort.removeprefix("-")
    column, row_id = table.c[name], table.c.id
    if after is not None:
        query = query.where(_behind(column, row_id, after, descending=descending))
    by_id = row_id.desc() if descending else row_id.asc()
    if name == "id":
        query = query.order_by(by_id)
    else:
        ordered = column.desc() if descending else column.asc()
        query = query.order_by(ordered.nulls_last(), by_id)
    found = connection.execute(query.limit(limit + 1)).mappings().all()
    rows = found[:limit]
    if len(found) <= limit:
        return rows, None
    last = rows[-1]
    if name == "id":
        return rows, str(last["id"])
    return rows, msgspec.json.encode([last[name], last["id"]]).decode()


def _behind(
    column: Column[Any], row_id: Column[Any], after: str, *, descending: bool
) -> ColumnElement[bool]:
    def beyond(one: Column[Any], value: Any) -> ColumnElement[bool]:
        found: ColumnElement[bool] = one < value if descending else one > value
        return found

    try:
        if column is row_id:
            return beyond(row_id, _cursor_id(int(after)))
        value, last_id = msgspec.json.decode(after)
        last_id = _cursor_id(last_id)
        if value is not None and not isinstance(value, column.type.python_type | int):
            raise TypeError(value)
    except (ValueError, TypeError, msgspec.DecodeError):
        problem = f"after: must be the next_after of the page before, got {after[:100]!r}"
        raise ConfigError("request", [problem]) from None
    if value is None:
        return and_(column.is_(None), beyond(row_id, last_id))
    same = and_(column == value, beyond(row_id, last_id))
    return or_(beyond(column, value), same, column.is_(None))


def _cursor_id(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(value)
    return value


def experiment(row: RowMapping, waiting: Waiting) -> Experiment:
    """Turn a row into a resource; ``waiting`` knows why it waits."""
    return Experiment.of(
        row,
        waiting_reason=waiting.of_experiment(row["id"], row["state"]),
        result_problem=experiment_problem(row),
    )


def trial(row: RowMapping, waiting: Waiting) -> Trial:
    """Turn a row into a resource; ``waiting`` knows why it waits."""
    return Trial.of(
        row,
        waiting_reason=waiting.of_trial(
            row["id"], row["experiment_id"], row["state"], row["run_id"]
        ),
        result_problem=trial_problem(row),
    )


def checkpoint_list(connection: Connection, rows: Sequence[RowMapping]) -> list[Checkpoint]:
    """Turn rows into resources, each with the validation metrics at its step; one query more."""
    found: dict[int, dict[str, float | str]] = {}
    query = (
        select(checkpoints.c.id, metric_keys.c.name, points.c.value)
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
        .where(checkpoints.c.id.in_([row["id"] for row in rows]))
    )
    for row_id, name, value in connection.execute(query):
        found.setdefault(row_id, {})[name] = "NaN" if value is None else wire_number(value)
    return [Checkpoint.of(row, metrics=found.get(row["id"])) for row in rows]


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
    return [(each.id, each.group_name, each.name) for each in connection.execute(query)]


def log_page(
    connection: Connection,
    where: ColumnElement[bool],
    filters: Mapping[str, Any],
) -> tuple[Sequence[RowMapping], int | None]:
    """Return lines in the order in which they arrived, and the cursor of the next page.

    Args:
        connection: For reading.
        where: Whose lines.
        filters: ``after`` (id of a line) and ``limit``; ``tail`` for the last lines instead;
            ``level`` for the least level; ``rank``.
    """
    query = select(logs).where(where)
    if filters.get("rank") is not None:
        query = query.where(logs.c.rank == filters["rank"])
    level = filters.get("level")
    if level is not None and level != LEVELS[0]:
        wanted = logs.c.level.in_(LEVELS[LEVELS.index(level) :])
        query = query.where(or_(wanted, logs.c.level.is_(None)) if level == "INFO" else wanted)
    limit = filters["limit"]
    if filters.get("tail") is not None:
        last = query.order_by(logs.c.id.desc()).limit(filters["tail"])
        return connection.execute(last).mappings().all()[::-1], None
    query = query.where(logs.c.id > filters["after"]).order_by(logs.c.id).limit(limit + 1)
    found = connection.execute(query).mappings().all()
    more = len(found) > limit
    return found[:limit], int(found[limit - 1]["id"]) if more else None


def agent_list(connection: Connection) -> list[Agent]:
    """Return every agent, with what runs on its slots."""
    held: dict[tuple[int, int], int] = {}
    active = select(runs.c.id, runs.c.agent_id, runs.c.slot_ids).where(
        runs.c.state != RunState.EXITED
    )
    for run_id, agent_id, slot_ids in connection.execute(active):
        for slot in msgspec.json.decode(slot_ids):
            held[agent_id, slot] = run_id
    rows = connection.execute(select(agents).order_by(agents.c.id)).mappings()
    return [
        Agent.of(
            row,
            slots=[
                Slot(**slot, run_id=held.get((row["id"], slot["id"])))
                for slot in msgspec.json.decode(row["slots"])
            ],
        )
        for row in rows
    ]


def jobs(connection: Connection, waiting: Waiting) -> list[Job]:
    """Return the experiments that have not ended, in the order of the queue."""
    held: dict[int, int] = {}
    active = select(runs.c.experiment_id, runs.c.slot_ids).where(runs.c.state != RunState.EXITED)
    for experiment_id, slot_ids in connection.execute(active):
        held[experiment_id] = held.get(experiment_id, 0) + len(msgspec.json.decode(slot_ids))
    counted = select(trials.c.experiment_id, trials.c.state, func.count()).group_by(
        trials.c.experiment_id, trials.c.state
    )
    open_ones = select(experiments).where(experiments.c.state.not_in(EXPERIMENT_ENDED))
    rows = (
        connection.execute(open_ones.order_by(experiments.c.priority, experiments.c.id))
        .mappings()
        .all()
    )
    ids = [row["id"] for row in rows]
    counts = {
        (experiment_id, state): number
        for experiment_id, state, number in connection.execute(
            counted.where(trials.c.experiment_id.in_(ids))
        )
    }
    return [
        Job.of(
            row,
            experiment_id=row["id"],
            slots_per_trial=row["slots"],
            running_trials=counts.get((row["id"], "RUNNING"), 0),
            queued_trials=counts.get((row["id"], "QUEUED"), 0),
            held_slots=held.get(row["id"], 0),
            waiting_reason=waiting.of_experiment(row["id"], row["state"]),
        )
        for row in rows
    ]
