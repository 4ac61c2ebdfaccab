"""Agents, jobs, pools and quotas, as the windows read them; no query in a loop."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from zerolab.scheduler import DEFAULT_POOL, Policy
from zeroserver.analysis.cost import count_host_slots
from zeroserver.api.resources import Agent, Job, Pool, Quota, Slot
from zeroserver.orchestrator.cluster.scheduler_input import OPEN_RUNS, down_slots, why_closed
from zeroserver.orchestrator.node_service import held_slots
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import EXPERIMENT_ENDED
from zeroserver.store.rows import AgentRow, read_rows
from zeroserver.store.schema import agents, experiments, pools, quotas, runs, trials

__all__ = ["agent_list", "job_list", "pool_list", "quota_list"]


def agent_list(orchestrator: Orchestrator, connection: Connection) -> list[Agent]:
    """Return every agent, with what runs on its slots."""
    used: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for row in held_slots(connection, OPEN_RUNS):
        for slot in msgspec.json.decode(row.slot_ids):
            used[row.agent_id][slot] = row.id
    rows = read_rows(connection, AgentRow, select(agents).order_by(agents.c.id))
    return [_agent(orchestrator, row, used[row.id]) for row in rows]


def _agent(orchestrator: Orchestrator, row: AgentRow, used: Mapping[int, int]) -> Agent:
    """Return an agent, of whose slots runs hold some: slot to run."""
    reported = msgspec.json.decode(row.slots)
    down = down_slots(reported, used)
    disabled = set(msgspec.json.decode(row.disabled_slots))
    slots = [
        Slot(
            id=slot["id"],
            device=slot["device"],
            run_id=used.get(slot["id"]),
            enabled=bool(row.enabled) and slot["id"] not in disabled,
            down=slot["id"] in down,
        )
        for slot in reported
    ]
    state = _state(orchestrator, row, busy=bool(used))
    silent_s = round(orchestrator.agents.silence_s(row.id), 1)
    return Agent.of(row, slots=slots, state=state, silent_s=silent_s)


def _state(orchestrator: Orchestrator, row: AgentRow, *, busy: bool) -> str:
    if not row.alive:
        return "gone"
    if row.leaving:
        return "leaving"
    if not row.enabled:
        return "draining" if busy else "disabled"
    return "silent" if why_closed(orchestrator, row) else "ready"


def job_list(orchestrator: Orchestrator, connection: Connection) -> list[Job]:
    """Return the experiments that have not ended, pool by pool in the order of the queue."""
    used = _held(connection)
    policies = _policies(connection)
    columns = experiments.c
    query = select(
        columns.id, columns.name, columns.state, columns.pool, columns.priority, columns.weight,
        columns.max_slots, columns.queue_time, columns.labels, columns.slots, columns.position,
        columns.host_slots, columns.created_at,
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
    """Say of elastic experiments which trial, the first, runs on fewer slots than its own."""
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


def pool_list(orchestrator: Orchestrator, connection: Connection) -> list[Pool]:
    """Return every pool that has agents or jobs, or of which something was said."""
    policies = _policies(connection)
    limits = _limits(connection)
    alive_agents = [agent for agent in agent_list(orchestrator, connection) if agent.alive]
    counted = (
        select(experiments.c.pool, func.count())
        .where(experiments.c.state.not_in(EXPERIMENT_ENDED))
        .group_by(experiments.c.pool)
    )
    jobs = {row[0]: row[1] for row in connection.execute(counted)}
    named = {group.removeprefix("pool:") for group in limits if group.startswith("pool:")}
    names = {DEFAULT_POOL, *policies, *jobs, *named, *(agent.pool for agent in alive_agents)}
    return [
        Pool(
            name=name,
            policy=policies.get(name, Policy.FAIR_SHARE).value,
            agents=sum(agent.pool == name for agent in alive_agents),
            slots=sum(len(agent.slots) for agent in alive_agents if agent.pool == name),
            free_slots=sum(_free(agent) for agent in alive_agents if agent.pool == name),
            jobs=jobs.get(name, 0),
            max_slots=limits.get(f"pool:{name}"),
        )
        for name in sorted(names, key=lambda name: (name != DEFAULT_POOL, name))
    ]


def _free(agent: Agent) -> int:
    ready = agent.state == "ready"
    return sum(_is_free(slot) for slot in agent.slots) if ready else 0


def _is_free(slot: Slot) -> bool:
    return slot.run_id is None and slot.enabled and not slot.down


def quota_list(connection: Connection) -> list[Quota]:
    """Return every quota, with what is held of it."""
    limits = _limits(connection)
    by_job = _held(connection)
    columns = experiments.c
    query = select(columns.id, columns.pool, columns.labels).where(columns.id.in_(list(by_job)))
    used: Counter[str] = Counter()
    for row in connection.execute(query):
        labels = msgspec.json.decode(row.labels, type=list[str])
        for group in {f"pool:{row.pool}", *(f"label:{label}" for label in labels)}:
            used[group] += by_job[row.id]
    return [Quota(group, most, used[group]) for group, most in sorted(limits.items())]


def _policies(connection: Connection) -> dict[str, Policy]:
    return {row.name: Policy(row.policy) for row in connection.execute(select(pools))}


def _limits(connection: Connection) -> dict[str, int]:
    return {row.group_name: row.max_slots for row in connection.execute(select(quotas))}


def _held(connection: Connection) -> Counter[int]:
    """Experiment to the slots that it holds."""
    used: Counter[int] = Counter()
    for row in held_slots(connection, OPEN_RUNS):
        used[row.experiment_id] += len(msgspec.json.decode(row.slot_ids))
    return used
