"""Queries of jobs and quotas as resources, without a query in a loop."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select, text

from zerolab import scheduler
from zerolab.scheduler import Cluster, Policy
from zeroserver.analysis.cost import count_host_slots
from zeroserver.api.cluster.cluster_queries import pool_policies
from zeroserver.extensions.queue.resources import Job, Quota
from zeroserver.orchestrator.cluster.scheduler_input import EVERY_USER, OPEN_RUNS, read_quotas
from zeroserver.orchestrator.node_service import held_slots
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import EXPERIMENT_ENDED, ExperimentState
from zeroserver.store.schema import WAITING, experiments, projects, quotas, runs, trials, users
from zeroserver.store.user_directory import UserDirectory

__all__ = ["job_list", "quota_list"]


def job_list(orchestrator: Orchestrator, connection: Connection) -> list[Job]:
    """Return the experiments that have not ended, by pool and in the order in which they start."""
    used = _held(connection)
    columns = experiments.c
    query = select(
        columns.id, columns.name, columns.state, columns.pool, columns.priority, columns.weight,
        columns.max_slots, columns.queue_time, columns.labels, columns.slots, columns.position,
        columns.host_slots, columns.created_at, columns.owner_id, columns.project_id,
    ).where(columns.state.not_in(EXPERIMENT_ENDED))  # fmt: skip
    rows = list(connection.execute(query))
    counted = (
        select(trials.c.experiment_id, trials.c.state, func.count())
        .join(experiments, experiments.c.id == trials.c.experiment_id)
        .where(columns.state.not_in(EXPERIMENT_ENDED))
        .group_by(trials.c.experiment_id, trials.c.state)
    )
    counts = {(home, state): number for home, state, number in connection.execute(counted)}
    fewer = _on_fewer(connection)
    queue = _Queue(orchestrator, connection, rows, used)
    return [
        Job.of(
            row,
            experiment_id=row.id,
            owner=orchestrator.users.shown_owner(row.owner_id),
            project=orchestrator.projects.shown_name(row.project_id),
            place=queue.places.get(row.id),
            order_reason=queue.reason(row.id),
            slots_per_trial=row.slots,
            host_slots=count_host_slots(row.host_slots),
            running_trials=counts.get((row.id, "RUNNING"), 0),
            queued_trials=counts.get((row.id, "QUEUED"), 0),
            held_slots=used[row.id],
            waiting_reason=orchestrator.queue.waiting.of_job(row.id, row.state),
            fewer_reason=fewer.get(row.id),
        )
        for row in sorted(rows, key=queue.turn)
    ]


class _Queue:
    """Order in which waiting experiments start, by pool.

    Args:
        orchestrator: Users and their recent usage.
        connection: Database connection.
        rows: All experiments that have not ended.
        used: Slots that each experiment holds.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        connection: Connection,
        rows: Sequence[Any],
        used: Mapping[int, int],
    ) -> None:
        usage = orchestrator.queue.usage
        self._users = orchestrator.users
        self._cluster = Cluster(
            agents=(),
            policies=pool_policies(connection),
            weights={user.name: user.weight for user in orchestrator.users.users()},
            usage={} if usage is None else usage.advance(orchestrator.steady()).slot_seconds,
        )
        self._jobs = {
            row.id: scheduler.Job(
                job_id=row.id,
                slots=row.slots,
                position=row.position,
                pool=row.pool,
                priority=row.priority,
                weight=row.weight,
                owner=orchestrator.users.name_of(row.owner_id),
            )
            for row in rows
        }
        self._held = {key: slots for key, slots in used.items() if key in self._jobs}
        query = select(trials.c.experiment_id).where(text(WAITING)).distinct()
        queued = set(connection.scalars(query))
        waiting = [
            self._jobs[row.id]
            for row in rows
            if row.state == ExperimentState.ACTIVE and row.id in queued
        ]
        running = [(self._jobs[key], slots) for key, slots in self._held.items()]
        self.places: dict[int, int] = {}
        """Waiting experiment to its place in its pool, from 1."""
        passed: Counter[str] = Counter()
        for experiment_id in scheduler.queue_order(self._cluster, waiting, running):
            pool = self._jobs[experiment_id].pool
            passed[pool] += 1
            self.places[experiment_id] = passed[pool]
        self._plain = self._plain_places(waiting)
        self._held_by_user: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Pool to the users whose experiments hold slots of it or wait for them."""
        for key in self._held.keys() | self.places.keys():
            job = self._jobs[key]
            self._held_by_user[job.pool][job.owner] += self._held.get(key, 0)

    def _plain_places(self, waiting: list[scheduler.Job]) -> dict[int, int]:
        """Return the places by priority and position, without shares."""
        places: dict[int, int] = {}
        passed: Counter[str] = Counter()
        for job in sorted(waiting, key=self._key):
            passed[job.pool] += 1
            places[job.job_id] = passed[job.pool]
        return places

    def _key(self, job: scheduler.Job) -> tuple[str, int, float, int]:
        fifo = self._cluster.policy(job.pool) is Policy.FIFO
        return job.pool, 0 if fifo else job.priority, job.position, job.job_id

    def turn(self, row: Any) -> tuple[Any, ...]:
        """Return the sort key of an experiment: running, waiting, then paused ones."""
        place = self.places.get(row.id)
        group = (
            1 if place else 0 if row.state == ExperimentState.ACTIVE or row.id in self._held else 2
        )
        return row.pool, group, place or 0, self._key(self._jobs[row.id])

    def reason(self, experiment_id: int) -> str | None:
        """Return why an experiment starts later than by priority and position."""
        place = self.places.get(experiment_id)
        if place is None or place <= self._plain[experiment_id]:
            return None
        job = self._jobs[experiment_id]
        held = self._held_by_user[job.pool]
        if len(held) == 1:
            slots = _slots(self._held.get(experiment_id, 0))
            return f"it holds {slots}, with weight {job.weight:g}"
        weights = {user: self._cluster.weights.get(user, 1.0) for user in held}
        due = sum(held.values()) * weights[job.owner] / sum(weights.values())
        hours = self._cluster.usage.get(job.account, 0.0) / 3600
        text = f"user {job.owner} holds {_slots(held[job.owner])}, and a fair share is {due:.3g}"
        return f"{text}; recent use: {hours:.3g} slot-hours"


def _slots(number: int) -> str:
    return "1 slot" if number == 1 else f"{number} slots"


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
