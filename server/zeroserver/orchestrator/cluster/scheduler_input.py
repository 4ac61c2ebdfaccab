"""Input of the scheduler from the database: queue, slots and rules.

A round with ten thousand waiting jobs must be cheap. A partial index contains only the queued
trials, and the properties that the trials of an experiment share are cached.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from zerolab.contract.names import TASK_LABEL
from zerolab.scheduler import (
    Account,
    AgentSlots,
    Allocation,
    Cluster,
    Job,
    Policy,
    RecentUsage,
    Request,
)
from zerolab.scheduler.usage import HALF_LIFE_S, recent
from zeroserver.orchestrator.caches import QueueCache
from zeroserver.orchestrator.node_service import held_slots
from zeroserver.orchestrator.service import Service
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import EXPERIMENT_STOPPING, ExperimentState, RunState
from zeroserver.store.rows import AgentRow, UserRow, read_rows
from zeroserver.store.schema import (
    WAITING,
    agents,
    experiments,
    pools,
    projects,
    quotas,
    run_nodes,
    runs,
    users,
)

__all__ = ["EVERY_USER", "OPEN_RUNS", "SchedulerInput", "down_slots", "read_quotas", "why_closed"]

OPEN_RUNS = (RunState.ASSIGNED, RunState.RUNNING)
"""Runs in these states hold their slots."""
EVERY_USER = "user:*"
"""Quota of each user that has no other one."""
_DUE = f"{WAITING} AND (restart_at IS NULL OR restart_at <= ?)"
_QUEUE = (
    "SELECT experiment_id, excluded, COUNT(*), MIN(id) FROM trials "  # noqa: S608 - our own words
    f"WHERE {_DUE} GROUP BY experiment_id, excluded"
)
_INDEXED = _QUEUE.replace("FROM trials", "FROM trials INDEXED BY ix_trials_waiting")
"""SQLite has no statistics here, so its planner would not choose this index."""
_NEXT = (
    "SELECT id FROM trials "  # noqa: S608 - our own words
    f"WHERE {_DUE} AND experiment_id = ? AND excluded = ? ORDER BY id LIMIT ?"
)
_HALTED = "SELECT id FROM experiments WHERE state IN ({})".format(  # noqa: S608 - our own words
    ", ".join(f"'{state}'" for state in sorted(EXPERIMENT_STOPPING | {ExperimentState.PAUSED}))
)
"""Selects experiments whose trials must not start; ended ones have no queued trials."""
_MOST_AT_ONCE = 500
"""Maximum number of ids in one query."""
_RECENT_RUNS = 5000
"""Number of runs from which usage by user is read after a start of the server."""
_NO_AGENT: frozenset[int] = frozenset()


class SchedulerInput(Service):
    """Reads the queue and the cluster for the scheduler."""

    @property
    def cache(self) -> QueueCache:
        """Queue entries that outlive the unit of work."""
        return self.work.orchestrator.queue

    def read_queue(self) -> list[Request]:
        """Return the trials that may start now, grouped into requests of identical trials."""
        counted = self.work.raw(_INDEXED if self.work.sqlite else _QUEUE, (self.work.steady(),))
        if not counted:
            return []
        halted = {experiment_id for (experiment_id,) in self.work.raw(_HALTED)}
        jobs = self.jobs_of([row[0] for row in counted])
        return [
            Request(
                first,
                jobs[experiment_id],
                count,
                _NO_AGENT if excluded == "[]" else frozenset(msgspec.json.decode(excluded)),
            )
            for experiment_id, excluded, count, first in counted
            if experiment_id not in halted
        ]

    def next_trials(self, request: Request, number: int) -> list[int]:
        """Return the first trials of a request, at most ``number``."""
        if number > request.trials == 1:
            return [request.trial_id]
        excluded = msgspec.json.encode(sorted(request.excluded)).decode()
        row = (self.work.steady(), request.job.job_id, excluded, number)
        return [trial_id for (trial_id,) in self.work.raw(_NEXT, row)]

    def jobs_of(self, experiment_ids: Iterable[int]) -> dict[int, Job]:
        """Return the scheduler's jobs, with those of some experiments loaded into the cache."""
        missing = sorted(set(experiment_ids).difference(self.cache.jobs))
        for start in range(0, len(missing), _MOST_AT_ONCE):
            batch = missing[start : start + _MOST_AT_ONCE]
            self.cache.jobs.update((job.job_id, job) for job in self._load(batch))
        if missing:  # their rows may be new in this transaction
            self.work.undo.append(lambda: self.cache.drop(missing))
        return self.cache.jobs

    def _load(self, experiment_ids: list[int]) -> Iterable[Job]:
        columns = experiments.c
        query = select(
            columns.id, columns.slots, columns.position, columns.pool, columns.priority,
            columns.weight, columns.max_slots, columns.labels, columns.concurrent_trials,
            columns.max_nodes, columns.slots_per_rank, columns.fewer_slots, columns.host_slots,
            users.c.name.label("owner"), projects.c.name.label("project"),
        ).join(users, users.c.id == columns.owner_id)  # fmt: skip
        query = query.join(projects, projects.c.id == columns.project_id)
        for row in self.work.connection.execute(query.where(columns.id.in_(experiment_ids))):
            labels = msgspec.json.decode(row.labels, type=list[str])
            max_slots, max_slots_key = _most_slots(row.max_slots, row.slots, row.concurrent_trials)
            yield Job(
                job_id=row.id,
                slots=row.slots,
                position=row.position,
                pool=row.pool,
                priority=row.priority,
                weight=row.weight,
                owner=row.owner,
                max_slots=max_slots,
                max_slots_key=max_slots_key,
                slots_key="--slots" if TASK_LABEL in labels else "resources.slots_per_trial",
                groups=(
                    f"pool:{row.pool}",
                    f"user:{row.owner}",
                    f"project:{row.project}",
                    *(f"label:{label}" for label in dict.fromkeys(labels)),
                    *msgspec.json.decode(row.host_slots, type=list[str]),
                ),
                single_agent=row.max_nodes == 1,
                max_agents=row.max_nodes,
                unit=row.slots_per_rank,
                fewer=tuple(msgspec.json.decode(row.fewer_slots, type=list[int])),
            )

    def held_by_run(self) -> dict[int, Allocation]:
        """Return the allocation of every open run."""
        rows = held_slots(self.work.connection, OPEN_RUNS)
        jobs = self.jobs_of({row.experiment_id for row in rows})
        allocations: dict[int, Allocation] = {}
        for run_id, group in groupby(rows, lambda row: row.id):
            nodes = list(group)
            allocations[run_id] = Allocation(
                run_id,
                jobs[nodes[0].experiment_id],
                {row.agent_id: tuple(msgspec.json.decode(row.slot_ids)) for row in nodes},
                stopping=nodes[0].directive != "train" or bool(nodes[0].killed),
            )
        return allocations

    def recent_usage(self) -> RecentUsage:
        """Return the usage of each pool by user until now."""
        now = self.work.steady()
        usage = self.cache.usage
        return self._read_usage(now) if usage is None else usage.advance(now)

    def _read_usage(self, now: float) -> RecentUsage:
        """Return the usage by user from the newest runs."""
        newest = select(runs).order_by(runs.c.id.desc()).limit(_RECENT_RUNS).subquery()
        query = (
            select(
                experiments.c.pool,
                users.c.name,
                newest.c.created_at,
                func.coalesce(newest.c.ended_at, now),
                func.coalesce(run_nodes.c.slot_ids, newest.c.slot_ids),
            )
            .select_from(newest)
            .join(experiments, experiments.c.id == newest.c.experiment_id)
            .join(users, users.c.id == experiments.c.owner_id)
            .outerjoin(run_nodes, run_nodes.c.run_id == newest.c.id)
            .where(func.coalesce(newest.c.ended_at, now) > now - 6 * HALF_LIFE_S)
        )
        slot_seconds: defaultdict[Account, float] = defaultdict(float)
        for pool, owner, start, end, slot_ids in self.work.connection.execute(query):
            number = len(msgspec.json.decode(slot_ids))
            slot_seconds[pool, owner] += recent(number, start, end, now)
        return RecentUsage(now, slot_seconds, {})

    def read_cluster(
        self,
        allocations: Iterable[Allocation],
        reporting: Allocation | None = None,
    ) -> Cluster:
        """Return the live agents, the pools' policies and the quotas.

        Args:
            allocations: Allocation of every open run.
            reporting: Allocation of a run that has just reported, so its nodes are not lost.
        """
        used_slots: defaultdict[int, set[int]] = defaultdict(set)
        for run in allocations:
            for agent_id, slots in run.slots.items():
                used_slots[agent_id].update(slots)
        intact = {} if reporting is None else reporting.slots
        connection = self.work.connection
        all_users = self.work.orchestrator.users.users()
        alive = select(agents).where(agents.c.alive == 1).order_by(agents.c.id)
        return Cluster(
            agents=[
                _agent(self.work.orchestrator, row, used_slots[row.id], intact.get(row.id, ()))
                for row in read_rows(connection, AgentRow, alive)
            ],
            policies={row.name: Policy(row.policy) for row in connection.execute(select(pools))},
            quotas=read_quotas(connection, all_users),
            weights={user.name: user.weight for user in all_users},
            usage=self.recent_usage().slot_seconds,
        )


def read_quotas(connection: Connection, all_users: Iterable[UserRow]) -> dict[str, int]:
    """Return the maximum number of slots of each group, with the default of users.

    Args:
        connection: Database connection.
        all_users: Users of the installation.
    """
    query = select(quotas.c.group_name, quotas.c.max_slots)
    limits = {row.group_name: row.max_slots for row in connection.execute(query)}
    default = limits.pop(EVERY_USER, None)
    if default is not None:
        for user in all_users:
            limits.setdefault(f"user:{user.name}", default)
    return limits


def _most_slots(max_slots: int | None, slots: int, concurrent: int) -> tuple[int | None, str]:
    """Return the maximum number of slots of an experiment and the key that sets it.

    A searcher may start another trial as soon as one has finished its part. While that one still
    saves its checkpoint, the limit makes the new trial wait.
    """
    if concurrent and (max_slots is None or concurrent * slots < max_slots):
        return concurrent * slots, "searcher.max_concurrent_trials"
    return max_slots, "resources.max_slots"


def down_slots(
    slots: Iterable[Mapping[str, Any]], used_slots: Collection[int], intact: Collection[int] = ()
) -> set[int]:
    """Return the slots of an agent whose cluster nodes count as lost.

    The agent reports how many nodes are lost, not which ones, since cluster managers number nodes
    differently. Nodes without runs are assumed to be lost first, the highest number first, so that
    the number of free slots is never overestimated.

    Args:
        slots: Slots as reported by the agent; a slot without a node is a node by itself.
        used_slots: Slots that runs hold.
        intact: Slots of a run that is known to train; their nodes count as lost last.
    """
    nodes: defaultdict[int, set[int]] = defaultdict(set)
    lost: set[int] = set()
    for slot in slots:
        node = slot["id"] if slot.get("node") is None else slot["node"]
        nodes[node].add(slot["id"])
        if slot.get("down"):
            lost.add(node)

    def loss_order(node: int) -> tuple[bool, bool, int]:
        return not nodes[node].isdisjoint(intact), not nodes[node].isdisjoint(used_slots), -node

    nodes_by_loss = sorted(nodes, key=loss_order)
    return {slot for node in nodes_by_loss[: len(lost)] for slot in nodes[node]}


def _agent(
    orchestrator: Orchestrator, row: AgentRow, used_slots: Collection[int], intact: Collection[int]
) -> AgentSlots:
    slots = msgspec.json.decode(row.slots)
    disabled = set(msgspec.json.decode(row.disabled_slots))
    down = down_slots(slots, used_slots, intact) - disabled
    cuda = any(str(slot["device"]).startswith("cuda") for slot in slots)
    return AgentSlots(
        agent_id=row.id,
        slots=tuple(int(slot["id"]) for slot in slots if slot["id"] not in disabled | down),
        kind="cuda" if cuda else "cpu",
        pool=row.pool,
        name=row.name,
        closed=why_closed(orchestrator, row),
        disabled=sum(slot["id"] in disabled for slot in slots),
        down=len(down),
    )


def why_closed(orchestrator: Orchestrator, row: AgentRow) -> str:
    """Return why no new runs start on an agent; empty if they may."""
    if row.leaving:
        return "is shutting down"
    if not row.enabled:
        return "is disabled"
    silent = orchestrator.agents.silence_s(row.id)
    if silent > orchestrator.settings.timings.agent_silent_s:
        return "does not respond"
    return ""
