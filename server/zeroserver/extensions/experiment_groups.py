"""Groups of experiments: numbers and the best result by user, project, label, state or key."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
from fastapi import Query
from sqlalchemy import Connection, Row, select

from zerolab.contract.secrets import mask_secrets
from zerolab.errors import ConfigError
from zeroserver.access.routes import ACCESS, VIEWER
from zeroserver.api.experiments import FilterDep
from zeroserver.api.rows import Resource
from zeroserver.api.strict_route import resource_router
from zeroserver.services import Services, ServicesDep
from zeroserver.states import EXPERIMENT_ENDED
from zeroserver.store.schema import experiments

__all__ = ["BestOfGroup", "ExperimentGroup", "ExperimentGroups", "router"]

router = resource_router("/api/v1/experiments", "experiments")

ACCESS["GET /api/v1/experiments/groups"] = VIEWER

_MOST_GROUPS = 1000
_FIELDS = ("user", "project", "label", "state", "pool", "searcher")

Value = str | float | bool | None


class BestOfGroup(Resource, frozen=True):
    """Best experiment of a group among those with the same metric."""

    metric: str
    """Name of the metric."""
    value: float
    """Its best value."""
    experiment_id: int
    """Experiment with this value."""


class ExperimentGroup(Resource, frozen=True):
    """Experiments with the same value."""

    value: str | float | bool | None
    """The value; null: not set, no single value, or no label."""
    experiments: int
    """Number of experiments."""
    unfinished: int
    """Number of experiments that have not ended."""
    failed: int
    """Number of experiments in the state `ERROR`."""
    best: list[BestOfGroup]
    """Best results, one for each metric; the most frequent metric first."""


class ExperimentGroups(Resource, frozen=True):
    """Groups of experiments, the largest first."""

    groups: list[ExperimentGroup]
    omitted: int
    """Number of smaller groups that are not listed."""
    next_after: None = None


_COLUMNS = (
    experiments.c.id, experiments.c.state, experiments.c.metric, experiments.c.smaller_is_better,
    experiments.c.best_validation,
)  # fmt: skip


@router.get("/groups")
async def group_experiments(
    services: ServicesDep,
    filters: FilterDep,
    by: Annotated[
        str,
        Query(
            max_length=200,
            description="`user`, `project`, `label`, `state`, `pool`, `searcher`, or a key of the "
            "configuration, such as `hyperparameters.lr`.",
        ),
    ],
) -> ExperimentGroups:
    """Count experiments by a value, with the best result of each; several labels count each."""
    column, values_of = _reader(services, by)

    def read(connection: Connection) -> ExperimentGroups:
        rows = connection.execute(filters(select(*_COLUMNS, column.label("content"))))
        members: dict[Value, list[Row[Any]]] = defaultdict(list)
        for row in rows:
            for value in values_of(row.content):
                members[value].append(row)
        ordered = sorted(members.items(), key=lambda item: (-len(item[1]), _text(item[0])))
        groups = [_group(value, found) for value, found in ordered[:_MOST_GROUPS]]
        return ExperimentGroups(groups, max(0, len(ordered) - _MOST_GROUPS))

    return await services.read(read)


def _reader(services: Services, by: str) -> tuple[Any, Callable[[Any], Iterable[Value]]]:
    """Return the column to read, and the function from its content to values of groups.

    Raises:
        ConfigError: If there is no such value.
    """
    columns, orchestrator = experiments.c, services.orchestrator
    if by == "user":
        return columns.owner_id, lambda content: [orchestrator.users.name_of(content)]
    if by == "project":
        return columns.project_id, lambda content: [orchestrator.projects.name_of(content)]
    if by == "label":
        return columns.labels, lambda content: dict.fromkeys(msgspec.json.decode(content)) or [None]
    if by in _FIELDS:
        named = {"state": columns.state, "pool": columns.pool, "searcher": columns.searcher_name}
        return named[by], lambda content: [content]
    block, *keys = by.split(".")
    if not keys or not all(keys):
        problem = f"by: must be one of {', '.join(_FIELDS)}, or a key such as hyperparameters.lr"
        raise ConfigError("request", [f"{problem}, got {by!r}"])

    def value_of(content: str) -> list[Value]:
        config = msgspec.json.decode(content)
        value: Any = mask_secrets({block: config[block]}) if block in config else None
        for key in (block, *keys):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, dict) and value.get("type") == "const":
            value = value.get("val")
        return [value if isinstance(value, str | int | float | bool) else None]

    return columns.config, value_of


def _text(value: Value) -> str:
    return "" if value is None else str(value)


def _group(value: Value, rows: list[Row[Any]]) -> ExperimentGroup:
    states = Counter(row.state for row in rows)
    measured: dict[tuple[str, bool], list[Row[Any]]] = defaultdict(list)
    for row in rows:
        if row.metric and row.best_validation is not None and math.isfinite(row.best_validation):
            measured[row.metric, bool(row.smaller_is_better)].append(row)
    best = []
    for (metric, smaller), found in sorted(measured.items(), key=lambda item: -len(item[1])):
        choose = min if smaller else max
        row = choose(found, key=lambda row: row.best_validation)
        best.append(BestOfGroup(metric, row.best_validation, row.id))
    return ExperimentGroup(
        value=value,
        experiments=len(rows),
        unfinished=sum(count for state, count in states.items() if state not in EXPERIMENT_ENDED),
        failed=states["ERROR"],
        best=best,
    )
