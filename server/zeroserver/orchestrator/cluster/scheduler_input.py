"""Input of the scheduler from the database: queue, slots and rules.

A round with ten thousand waiting jobs must stay cheap: the trials that wait are counted from an
index that holds nothing else, and what is common to an experiment's trials is kept in memory.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import Any

import msgspec
from sqlalchemy import select

from zerolab.contract.names import TASK_LABEL
from zerolab.scheduler import AgentSlots, Allocation, Cluster, Job, Policy, Request
from zeroserver.orchestrator.caches import QueueCache
from zeroserver.orchestrator.node_service import held_slots
from zeroserver.orchestrator.service import Service
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import EXPERIMENT_STOPPING, ExperimentState, RunState
from zeroserver.store.rows import AgentRow, read_rows
from zeroserver.store.schema import WAITING, agents, experiments, pools, quotas

__all__ = ["OPEN_RUNS", "SchedulerInput", "down_slots", "why_closed"]

OPEN_RUNS = (RunState.ASSIGNED, RunState.RUNNING)
"""Runs in these states hold their slots."""
_DUE = f"{WAITING} AND (restart_at IS NULL OR restart_at <= ?)"
_QUEUE = (
    "SELECT experiment_id, excluded, COUNT(*), MIN(id) FROM trials "  # noqa: S608 - our own words
    f"WHERE {_DUE} GROUP BY experiment_id, excluded"
)
_INDEXED = _QUEUE.replace("FROM trials", "FROM trials INDEXED BY ix_trials_waiting")
"""SQLite keeps no numbers by which it would see that this index is the better one."""
_NEXT = (
    "SELECT id FROM trials "  # noqa: S608 - our own words
    f"WHERE {_DUE} AND experiment_id = ? AND excluded = ? ORDER BY id LIMIT ?"
)
_HALTED = "SELECT id FROM experiments WHERE state IN ({})".format(  # noqa: S608 - our own words
    ", ".join(f"'{state}'" for state in sorted(EXPERIMENT_STOPPING | {ExperimentState.PAUSED}))
)
"""Experiments whose trials must not start; those of ended ones wait no more."""
_MOST_AT_ONCE = 500
"""Rows that one query names."""
_NO_AGENT: frozenset[int] = frozenset()


class SchedulerInput(Service):
    """Reads the queue and the cluster for the scheduler."""

    @property
    def cache(self) -> QueueCache:
        """Queue entries that outlive the unit of work."""
        return self.work.orchestrator.queue

    def read_queue(self) -> list[Request]:
        """Return the trials that may start now, together where they are alike."""
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
        """Return the first ``number`` trials of a request, or all that there are."""
        if number > request.trials == 1:
            return [request.trial_id]
        excluded = msgspec.json.encode(sorted(request.excluded)).decode()
        row = (self.work.steady(), request.job.job_id, excluded, number)
        return [trial_id for (trial_id,) in self.work.raw(_NEXT, row)]

    def jobs_of(self, experiment_ids: Iterable[int]) -> dict[int, Job]:
        """Return what the scheduler knows of some experiments; each is read once."""
        missing = sorted(set(experiment_ids).difference(self.cache.jobs))
        for start in range(0, len(missing), _MOST_AT_ONCE):
            batch = missing[start : start + _MOST_AT_ONCE]
            self.cache.jobs.update((job.job_id, job) for job in self._load(batch))
        if missing:  # their rows may be of this transaction
            self.work.undo.append(lambda: self.cache.drop(missing))
        return self.cache.jobs

    def _load(self, experiment_ids: list[int]) -> Iterable[Job]:
        columns = experiments.c
        query = select(
            columns.id, columns.slots, columns.position, columns.pool, columns.priority,
            columns.weight, columns.max_slots, columns.labels, columns.concurrent_trials,
            columns.max_nodes, columns.slots_per_rank, columns.fewer_slots, columns.host_slots,
        ).where(columns.id.in_(experiment_ids))  # fmt: skip
        for row in self.work.connection.execute(query):
            labels = msgspec.json.decode(row.labels, type=list[str])
            max_slots, max_slots_key = _most_slots(row.max_slots, row.slots, row.concurrent_trials)
            yield Job(
                job_id=row.id,
                slots=row.slots,
                position=row.position,
                pool=row.pool,
                priority=row.priority,
                weight=row.weight,
                max_slots=max_slots,
                max_slots_key=max_slots_key,
                slots_key="--slots" if TASK_LABEL in labels else "resources.slots_per_trial",
                groups=(
                    f"pool:{row.pool}",
                    *(f"label:{label}" for label in dict.fromkeys(labels)),
                    *msgspec.json.decode(row.host_slots, type=list[str]),
                ),
                single_agent=row.max_nodes == 1,
                max_agents=row.max_nodes,
                unit=row.slots_per_rank,
                fewer=tuple(msgspec.json.decode(row.fewer_slots, type=list[int])),
            )

    def held_by_run(self) -> dict[int, Allocation]:
        """Return what every run holds."""
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

    def read_cluster(
        self,
        allocations: Iterable[Allocation],
        asks: Allocation | None = None,
    ) -> Cluster:
        """Return the agents that are there, the pools' policies and the quotas.

        Args:
            allocations: What every run holds.
            asks: What the run holds that has just reported, and so is on no lost node.
        """
        used_slots: defaultdict[int, set[int]] = defaultdict(set)
        for run in allocations:
            for agent_id, slots in run.slots.items():
                used_slots[agent_id].update(slots)
        sure = {} if asks is None else asks.slots
        connection = self.work.connection
        alive = select(agents).where(agents.c.alive == 1).order_by(agents.c.id)
        return Cluster(
            agents=[
                _agent(self.work.orchestrator, row, used_slots[row.id], sure.get(row.id, ()))
                for row in read_rows(connection, AgentRow, alive)
            ],
            policies={row.name: Policy(row.policy) for row in connection.execute(select(pools))},
            quotas={row.group_name: row.max_slots for row in connection.execute(select(quotas))},
        )


def _most_slots(max_slots: int | None, slots: int, concurrent: int) -> tuple[int | None, str]:
    """Most slots of an experiment, as many as its trials may hold that run at a time; by which key.

    A searcher may begin another trial as soon as one has done its part; while that one still saves
    its checkpoint, the other one waits.
    """
    if concurrent and (max_slots is None or concurrent * slots < max_slots):
        return concurrent * slots, "searcher.max_concurrent_trials"
    return max_slots, "resources.max_slots"


def down_slots(
    slots: Iterable[Mapping[str, Any]], used_slots: Collection[int], sure: Collection[int] = ()
) -> set[int]:
    """Say for which slots of an agent its cluster has no node now.

    The agent says how many nodes are lost, not which: a cluster numbers its nodes in its own way.
    So what no run holds goes first, highest node first, and what is free is never overstated.

    Args:
        slots: As the agent has told; one without a node is a node of its own.
        used_slots: Those that runs hold.
        sure: Those of a run that is known to train now: they go last.
    """
    nodes: defaultdict[int, set[int]] = defaultdict(set)
    lost: set[int] = set()
    for slot in slots:
        node = slot["id"] if slot.get("node") is None else slot["node"]
        nodes[node].add(slot["id"])
        if slot.get("down"):
            lost.add(node)

    def turn(node: int) -> tuple[bool, bool, int]:
        return not nodes[node].isdisjoint(sure), not nodes[node].isdisjoint(used_slots), -node

    in_turn = sorted(nodes, key=turn)
    return {slot for node in in_turn[: len(lost)] for slot in nodes[node]}


def _agent(
    orchestrator: Orchestrator, row: AgentRow, used_slots: Collection[int], sure: Collection[int]
) -> AgentSlots:
    slots = msgspec.json.decode(row.slots)
    off = set(msgspec.json.decode(row.disabled_slots))
    down = down_slots(slots, used_slots, sure) - off
    cuda = any(str(slot["device"]).startswith("cuda") for slot in slots)
    return AgentSlots(
        agent_id=row.id,
        slots=tuple(int(slot["id"]) for slot in slots if slot["id"] not in off | down),
        kind="cuda" if cuda else "cpu",
        pool=row.pool,
        name=row.name,
        closed=why_closed(orchestrator, row),
        disabled=sum(slot["id"] in off for slot in slots),
        down=len(down),
    )


def why_closed(orchestrator: Orchestrator, row: AgentRow) -> str:
    """Say why nothing new starts on an agent; empty when something may."""
    if row.leaving:
        return "is about to leave"
    if not row.enabled:
        return "is disabled"
    silent = orchestrator.agents.silence_s(row.id)
    if silent > orchestrator.settings.timings.agent_silent_s:
        return "does not answer now"
    return ""
