"""Queries of jobs and quotas as resources, without a query in a loop."""

from collections import Counter
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from zerolab.scheduler import Policy
from zeroserver.analysis.cost import count_host_slots
from zeroserver.api.cluster.cluster_queries import pool_policies
from zeroserver.extensions.queue.resources import Job, Quota
from zeroserver.orchestrator.cluster.scheduler_input import EVERY_USER, OPEN_RUNS, read_quotas
from zeroserver.orchestrator.node_service import held_slots
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import EXPERIMENT_ENDED
from zeroserver.store.schema import experiments, projects, quotas, runs, trials, users
from zeroserver.store.user_directory import UserDirectory

__all__ = ["job_list", "quota_list"]


def job_list(orchestrator: Orchestrator, connection: Connection) -> list[Job]:
    """Return the experiments that have not ended, by pool and in the order of the queue."""
    used = _held(connection)
    policies = pool_policies(connection)
    columns = experiments.c
    query = select(
        columns.id, columns.name, columns.state, columns.pool, columns.priority, columns.weight,
        columns.max_slots, columns.queue_time, columns.labels, columns.slots, columns.position,
        columns.host_slots, columns.created_at, columns.owner_id, columns.project_id,
    ).where(columns.state.not_in(EXPERIMENT_ENDED))  # fmt: skip
    rows = list(connection.execute(query))

    def turn(row: Any) -> tuple[str, int, float, int]:
        fifo = policies.get(row.pool) == Policy.FIFO
        return row.pool, 0 if fifo else row.priority, row.position, row.id

    counted = (
        select(trials.c.experiment_id, trials.c.state, func.count())
        .join(experiments, experiments.c.id == trials.c.experiment_id)
        .where(columns.state.not_in(EXPERIMENT_ENDED))
        .group_by(trials.c.experiment_id, trials.c.state)
    )
    counts = {(home, state): number for home, state, number in connection.execute(counted)}
    fewer = _on_fewer(connection)
    places: Counter[str] = Counter()
    result = []
    for row in sorted(rows, key=turn):
        places[row.pool] += 1
        job = Job.of(
            row,
            experiment_id=row.id,
            owner=orchestrator.users.shown_owner(row.owner_id),
            project=orchestrator.projects.shown_name(row.project_id),
            place=places[row.pool],
            slots_per_trial=row.slots,
            host_slots=count_host_slots(row.host_slots),
            running_trials=counts.get((row.id, "RUNNING"), 0),
            queued_trials=counts.get((row.id, "QUEUED"), 0),
            held_slots=used[row.id],
            waiting_reason=orchestrator.queue.waiting.of_job(row.id, row.state),
            fewer_reason=fewer.get(row.id),
        )
        result.append(job)
    return result


def _on_fewer(connection: Connection) -> dict[int, str]:
    """Return a message about the first trial of each elastic experiment on fewer slots."""
    query = (
        select(runs.c.id, runs.c.trial_id, runs.c.grows_to, experiments.c.slots)
        .join(experiments, experiments.c.id == runs.c.experiment_id)
        .where(runs.c.state.in_(OPEN_RUNS), experiments.c.fewer_slots != "[]")
    )
    elastic = {row.id: row for row in connection.execute(query)}
    used: Counter[int] = Counter()
    homes: dict[int, int] = {}
    for allocation in held_slots(connection, OPEN_RUNS) if elastic else ():
        used[allocation.id] += len(msgspec.json.decode(allocation.slot_ids))
        homes[allocation.id] = allocation.experiment_id
    result: dict[int, str] = {}
    for run_id, row in sorted(elastic.items()):
        if used[run_id] >= row.slots:
            continue
        text = f"trial {row.trial_id} runs on {used[run_id]} of its {row.slots} slots, and "
        text += (
            "takes more at a checkpoint, when they are free"
            if row.grows_to is None
            else f"leaves them for {row.grows_to}"
        )
        result.setdefault(homes[run_id], text)
    return result


def quota_list(connection: Connection, directory: UserDirectory) -> list[Quota]:
    """Return all quotas with the number of slots in use, including those of users by default."""
    stored = {row.group_name: row for row in connection.execute(select(quotas))}
    active = [user for user in directory.users() if user.active]
    limits = read_quotas(connection, active) | {
        group: row.max_slots for group, row in stored.items()
    }
    by_job = _held(connection)
    columns = experiments.c
    query = (
        select(
            columns.id, columns.pool, columns.labels,
            users.c.name.label("owner"), projects.c.name.label("project"),
        )
        .join(users, users.c.id == columns.owner_id)
        .join(projects, projects.c.id == columns.project_id)
        .where(columns.id.in_(list(by_job)))
    )  # fmt: skip
    used: Counter[str] = Counter()
    for row in connection.execute(query):
        labels = msgspec.json.decode(row.labels, type=list[str])
        groups = {f"pool:{row.pool}", f"user:{row.owner}", f"project:{row.project}"}
        for group in groups | {f"label:{label}" for label in labels}:
            used[group] += by_job[row.id]
        if f"user:{row.owner}" not in stored:
            used[EVERY_USER] += by_job[row.id]
    return [
        Quota(
            group=group,
            max_slots=most,
            held_slots=used[group],
            is_default=group not in stored,
            request_limit=stored[group].request_limit if group in stored else None,
        )
        for group, most in sorted(limits.items())
    ]


def _held(connection: Connection) -> Counter[int]:
    """Return the number of slots that each experiment holds."""
    used: Counter[int] = Counter()
    for row in held_slots(connection, OPEN_RUNS):
        used[row.experiment_id] += len(msgspec.json.decode(row.slot_ids))
    return used
