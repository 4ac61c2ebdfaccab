"""Route of the usage report, and its queries."""

import datetime
import re
from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple

import msgspec
from fastapi import Query
from sqlalchemy import Connection, func, select

from zerolab.errors import ConfigError
from zeroserver.access.routes import ACCESS, VIEWER
from zeroserver.analysis.cost import count_host_slots
from zeroserver.api.rows import Resource
from zeroserver.api.strict_route import resource_router
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.services import ServicesDep
from zeroserver.store.database import raw_rows
from zeroserver.store.schema import checkpoints, experiments, media, trials

__all__ = ["UsagePage", "UsageRow", "router"]

router = resource_router("/api/v1", "usage")

ACCESS["GET /api/v1/usage"] = VIEWER

_HOUR_S = 3600.0
# The number of slots is the length of a JSON list, in the SQL of both databases.
_RUNS = """
    SELECT experiment_id, sum(seconds * slots), sum(seconds) FROM (
        SELECT r.experiment_id, coalesce(n.slots, CASE WHEN r.slot_ids = '[]' THEN 0
                ELSE length(r.slot_ids) - length(replace(r.slot_ids, ',', '')) + 1 END) AS slots,
            CASE WHEN coalesce(r.ended_at, ?) < ? THEN coalesce(r.ended_at, ?) ELSE ? END
            - CASE WHEN r.created_at > ? THEN r.created_at ELSE ? END AS seconds
        FROM runs r LEFT JOIN (
            SELECT run_id, sum(CASE WHEN slot_ids = '[]' THEN 0
                ELSE length(slot_ids) - length(replace(slot_ids, ',', '')) + 1 END) AS slots
            FROM run_nodes GROUP BY run_id
        ) n ON n.run_id = r.id
        WHERE r.created_at < ? AND coalesce(r.ended_at, ?) > ?
    ) parts WHERE seconds > 0 GROUP BY experiment_id
"""


class UsageRow(Resource, frozen=True):
    """Usage of one user, project, label or pool."""

    name: str
    """Name of the user, project, label or pool; empty for experiments without labels."""
    experiments: int
    """Number of experiments that had slots in the month."""
    slot_hours: float
    """Slots x hours of their runs in the month."""
    disk_bytes: int
    """Size of checkpoints and media of all experiments, now."""


class UsagePage(Resource, frozen=True):
    """Usage in a month, the largest first."""

    month: str
    """Month in UTC, ``YYYY-MM``."""
    by: str
    """``user``, ``project``, ``label`` or ``pool``."""
    usage: list[UsageRow]
    next_after: None = None


class _Cost(NamedTuple):
    slot_seconds: float
    disk_bytes: int


@router.get("/usage")
async def show_usage(
    services: ServicesDep,
    by: Annotated[
        Literal["user", "project", "label", "pool"], Query(description="What to sum up.")
    ] = "user",
    month: Annotated[
        str | None, Query(max_length=20, description="Month in UTC, YYYY-MM; by default this one.")
    ] = None,
) -> UsagePage:
    """Return slot-hours in a month, and disk usage, by user, project, label or pool.

    An experiment counts for each of its labels. Deleted experiments do not count.
    """
    now = services.orchestrator.clock()
    month = month or datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y-%m")
    start, end = _bounds(month)

    def read(connection: Connection) -> UsagePage:
        costs = _costs(connection, start, end, now)
        return UsagePage(month, by, _rows(connection, services.orchestrator, by, costs))

    return await services.read(read)


def _bounds(month: str) -> tuple[float, float]:
    """Return start and end of a month in seconds since 1970.

    Raises:
        ConfigError: If it is no month.
    """
    if re.fullmatch(r"(19[7-9]\d|[2-9]\d{3})-(0[1-9]|1[0-2])", month) is None:
        problem = f"month: must be YYYY-MM, such as 2026-11, got {month!r}"
        raise ConfigError("usage", [problem])
    year, number = int(month[:4]), int(month[5:])
    first = datetime.datetime(year, number, 1, tzinfo=datetime.UTC).timestamp()
    days = 31 * 86400  # at least to the first day of the next month
    following = datetime.datetime.fromtimestamp(first + days, datetime.UTC)
    return first, following.replace(day=1).timestamp()


def _costs(connection: Connection, start: float, end: float, now: float) -> dict[int, _Cost]:
    """Return the cost of each experiment."""
    values = (now, end, now, end, start, start, end, now, start)
    hosts = {
        experiment_id: count_host_slots(host_slots)
        for experiment_id, host_slots in connection.execute(
            select(experiments.c.id, experiments.c.host_slots).where(
                experiments.c.host_slots != "[]"
            )
        )
    }
    seconds = {
        experiment_id: float(duration) * hosts[experiment_id]
        if experiment_id in hosts
        else float(slot_seconds)
        for experiment_id, slot_seconds, duration in raw_rows(connection, _RUNS, values)
    }
    disk: dict[int, int] = {}
    stored = select(checkpoints.c.experiment_id, func.sum(checkpoints.c.size_bytes)).where(
        checkpoints.c.state == "COMPLETED"
    )
    files = select(trials.c.experiment_id, func.sum(media.c.size)).join(
        trials, trials.c.id == media.c.trial_id
    )
    for query in (
        stored.group_by(checkpoints.c.experiment_id),
        files.group_by(trials.c.experiment_id),
    ):
        for experiment_id, size in connection.execute(query):
            disk[experiment_id] = disk.get(experiment_id, 0) + int(size)
    return {
        experiment_id: _Cost(seconds.get(experiment_id, 0.0), disk.get(experiment_id, 0))
        for experiment_id in seconds.keys() | disk.keys()
    }


def _rows(
    connection: Connection, orchestrator: Orchestrator, by: str, costs: dict[int, _Cost]
) -> list[UsageRow]:
    columns = experiments.c
    query = select(columns.id, columns.owner_id, columns.project_id, columns.labels, columns.pool)
    totals: dict[str, list[_Cost]] = {}
    for experiment_id, owner_id, project_id, labels, pool in connection.execute(query):
        if experiment_id not in costs:
            continue
        names: Iterable[str] = [pool]
        if by == "user":
            names = [orchestrator.users.name_of(owner_id)]
        elif by == "project":
            names = [orchestrator.projects.name_of(project_id)]
        elif by == "label":
            names = msgspec.json.decode(labels, type=list[str]) or [""]
        for name in names:
            totals.setdefault(name, []).append(costs[experiment_id])
    rows = [
        UsageRow(
            name=name,
            experiments=sum(cost.slot_seconds > 0 for cost in parts),
            slot_hours=sum(cost.slot_seconds for cost in parts) / _HOUR_S,
            disk_bytes=sum(cost.disk_bytes for cost in parts),
        )
        for name, parts in totals.items()
    ]
    return sorted(rows, key=lambda row: (-row.slot_hours, -row.disk_bytes, row.name))
