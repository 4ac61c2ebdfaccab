"""Rows of the tables as structs, and functions that read them.

The fields of a struct are the columns of its table in order, so that a row of the database driver
is converted by position.
"""

from functools import cache
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from sqlalchemy import Connection, Select, Table, bindparam, select

from zerolab.errors import NotFoundError
from zeroserver.store.schema import (
    agents,
    audit,
    checkpoints,
    comments,
    experiments,
    logs,
    media,
    models,
    notification_channels,
    notifications,
    projects,
    quota_requests,
    run_nodes,
    runs,
    searcher_events,
    shares,
    tokens,
    trials,
    users,
    views,
)

__all__ = [
    "AgentRow",
    "AuditRow",
    "ChannelRow",
    "CheckpointRow",
    "CommentRow",
    "ExperimentRow",
    "LogRow",
    "MediaRow",
    "ModelRow",
    "NodeRow",
    "NotificationRow",
    "ProjectRow",
    "QuotaRequestRow",
    "Reporting",
    "Row",
    "RunRow",
    "SearcherEventRow",
    "ShareRow",
    "TokenRow",
    "TrialRow",
    "UserRow",
    "ViewRow",
    "find_row",
    "read_row",
    "read_rows",
]


class Row(msgspec.Struct, frozen=True, gc=False):
    """Row of a table."""

    table: ClassVar[Table]


class UserRow(Row, frozen=True, gc=False):
    """Row of the table ``users``."""

    table: ClassVar[Table] = users

    id: int
    name: str
    role: Literal["viewer", "member", "admin"]
    active: int
    created_at: float
    password: str | None
    oidc_subject: str | None = None
    weight: float = 1.0


class TokenRow(Row, frozen=True, gc=False):
    """Row of the table ``tokens``."""

    table: ClassVar[Table] = tokens

    id: int
    user_id: int
    name: str
    digest: str
    created_at: float
    expires_at: float | None
    last_used_at: float | None


class ShareRow(Row, frozen=True, gc=False):
    """Row of the table ``shares``."""

    table: ClassVar[Table] = shares

    id: int
    owner_id: int
    name: str
    digest: str
    experiment_ids: str
    path: str
    created_at: float
    expires_at: float


class ViewRow(Row, frozen=True, gc=False):
    """Row of the table ``views``."""

    table: ClassVar[Table] = views

    id: int
    owner_id: int
    name: str
    path: str
    shared: int
    created_at: float
    updated_at: float


class CommentRow(Row, frozen=True, gc=False):
    """Row of the table ``comments``."""

    table: ClassVar[Table] = comments

    id: int
    experiment_id: int
    owner_id: int
    text: str
    created_at: float
    edited_at: float | None


class AuditRow(Row, frozen=True, gc=False):
    """Row of the table ``audit``."""

    table: ClassVar[Table] = audit

    id: int
    time: float
    user_id: int
    token_id: int
    action: str


class ProjectRow(Row, frozen=True, gc=False):
    """Row of the table ``projects``."""

    table: ClassVar[Table] = projects

    id: int
    name: str
    description: str
    notes: str
    archived: int
    owner_id: int
    created_at: float
    restricted: int = 0


class ExperimentRow(Row, frozen=True, gc=False):
    """Row of the table ``experiments``."""

    table: ClassVar[Table] = experiments

    id: int
    name: str
    description: str
    labels: str
    notes: str
    state: str
    config: str
    raw_config: str
    archive: str | None
    archived: int
    test_mode: int
    forked_from: int | None
    source_checkpoint: str | None
    searcher_name: str
    metric: str
    smaller_is_better: int
    seed: int
    slots: int
    priority: int
    weight: float
    max_slots: int | None
    pool: str
    position: float
    queue_time: int | None
    concurrent_trials: int
    max_nodes: int
    slots_per_rank: int
    fewer_slots: str
    host_slots: str
    waits_since: float | None
    searcher_done: int
    progress: float
    num_trials: int
    failed_trials: int
    canceled_trials: int
    best_trial_id: int | None
    best_validation: float | None
    error: str | None
    log_retention_days: int | None
    metric_retention_days: int | None
    metrics_expired_at: float | None
    creating: int
    deleting: int
    retention_due: int
    unread_hparams: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    owner_id: int
    project_id: int
    external_id: str | None


class TrialRow(Row, frozen=True, gc=False):
    """Row of the table ``trials``."""

    table: ClassVar[Table] = trials

    id: int
    experiment_id: int
    request_id: int
    state: str
    hparams: str
    seed: int
    restarts: int
    run_id: int | None
    until: int | None
    waits: int
    stop: str | None
    restart_at: float | None
    steps_completed: int
    progress: float
    searcher_steps: int
    best_validation: float | None
    best_steps: int | None
    latest_validation: float | None
    latest_checkpoint: str | None
    best_checkpoint: str | None
    source_trial_id: int | None
    source_steps: int | None
    source_checkpoint: str | None
    held: int
    activity: str | None
    excluded: str
    labels: str
    archived: int
    error: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None


class RunRow(Row, frozen=True, gc=False):
    """Row of the table ``runs``."""

    table: ClassVar[Table] = runs

    id: int
    trial_id: int
    experiment_id: int
    agent_id: int | None
    slot_ids: str
    state: str
    directive: str
    deadline_at: float | None
    killed: int
    killed_at: float | None
    no_retry: int
    grows_to: int | None
    spec: str
    last_seq: int
    next_log: int
    log_bytes: int
    log_first: int | None
    log_dropped_lines: int
    log_dropped_bytes: int
    created_at: float
    started_at: float | None
    ended_at: float | None
    exit_code: int | None
    reason: str | None


class NodeRow(Row, frozen=True, gc=False):
    """Row of the table ``run_nodes``."""

    table: ClassVar[Table] = run_nodes

    run_id: int
    node_rank: int
    agent_id: int | None
    slot_ids: str
    address: str | None
    next_log: int
    ended_at: float | None
    exit_code: int | None
    reason: str | None
    told: int


class CheckpointRow(Row, frozen=True, gc=False):
    """Row of the table ``checkpoints``."""

    table: ClassVar[Table] = checkpoints

    id: int
    uuid: str
    trial_id: int
    experiment_id: int
    run_id: int | None
    steps_completed: int
    state: str
    size_bytes: int
    resources: str
    metadata: str
    path: str
    created_at: float


class AgentRow(Row, frozen=True, gc=False):
    """Row of the table ``agents``."""

    table: ClassVar[Table] = agents

    id: int
    name: str
    host: str
    pool: str
    identity: str
    slots: str
    alive: int
    enabled: int
    leaving: int
    disabled_slots: str
    registered_at: float


class LogRow(Row, frozen=True, gc=False):
    """Row of the table ``logs``."""

    table: ClassVar[Table] = logs

    id: int
    experiment_id: int
    trial_id: int | None
    run_id: int | None
    rank: int | None
    stream: str
    level: str | None
    text: str
    time: float
    host: str | None


class MediaRow(Row, frozen=True, gc=False):
    """Row of the table ``media``."""

    table: ClassVar[Table] = media

    trial_id: int
    name: str
    step: int
    position: int
    type: str
    digest: str
    size: int
    suffix: str
    metadata: str
    time: float


class ModelRow(Row, frozen=True, gc=False):
    """Row of the table ``models``."""

    table: ClassVar[Table] = models

    id: int
    name: str
    description: str
    last_version: int
    created_at: float
    owner_id: int
    project_id: int


class SearcherEventRow(Row, frozen=True, gc=False):
    """Row of the table ``searcher_events``."""

    table: ClassVar[Table] = searcher_events

    id: int
    experiment_id: int
    kind: str
    request_id: int
    value: float | None
    length: float | None
    reason: str | None
    time: float


class ChannelRow(Row, frozen=True, gc=False):
    """Row of the table ``notification_channels``."""

    table: ClassVar[Table] = notification_channels

    id: int
    name: str
    kind: str
    url: str
    secret: str
    events: str
    all_experiments: int
    created_at: float
    user_id: int
    project_id: int


class QuotaRequestRow(Row, frozen=True, gc=False):
    """Row of the table ``quota_requests``."""

    table: ClassVar[Table] = quota_requests

    id: int
    user_id: int
    max_slots: int
    reason: str
    state: str
    created_at: float
    decided_at: float | None
    decided_by: int | None
    answer: str


class NotificationRow(Row, frozen=True, gc=False):
    """Row of the table ``notifications``."""

    table: ClassVar[Table] = notifications

    id: int
    channel_id: int
    event_key: str
    event: str
    experiment_id: int
    message: str
    state: str
    attempts: int
    due_at: float
    created_at: float
    ended_at: float | None
    error: str | None


R = TypeVar("R", bound=Row)


class Reporting(msgspec.Struct, frozen=True, gc=False):
    """Run that may report, with the completed steps of its trial."""

    id: int
    trial_id: int
    experiment_id: int
    last_seq: int
    steps_completed: int


def find_row(connection: Connection, kind: type[R], row_id: int | str) -> R:
    """Return a row by its id, or a checkpoint by its uuid.

    Raises:
        NotFoundError: If there is no such row.
    """
    query = _query_by_id(kind.table, "uuid" if isinstance(row_id, str) else "id")
    row = connection.execute(query, {"id": row_id}).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no {kind.table.name.removesuffix('s')} {row_id}")
    return kind(*row)


def read_row(connection: Connection, kind: type[R], query: Select[Any]) -> R | None:
    """Return the single row of a query on a table; None if it is empty."""
    row = connection.execute(query).one_or_none()
    return None if row is None else kind(*row)


def read_rows(connection: Connection, kind: type[R], query: Select[Any]) -> list[R]:
    """Return the rows of a query on a table."""
    return [kind(*row) for row in connection.execute(query)]


@cache
def _query_by_id(table: Table, column: str) -> Select[Any]:
    """Return a query by id; cached, since compiling it takes longer than running it."""
    return select(table).where(table.c[column] == bindparam("id"))
