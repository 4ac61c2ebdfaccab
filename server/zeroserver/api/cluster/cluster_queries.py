"""Queries of agents and pools as resources, without a query in a loop."""

from collections import defaultdict
from collections.abc import Mapping

import msgspec
from sqlalchemy import Connection, func, select

from zerolab.scheduler import DEFAULT_POOL, Policy
from zeroserver.api.resources import Agent, Pool, Slot
from zeroserver.orchestrator.cluster.scheduler_input import OPEN_RUNS, down_slots, why_closed
from zeroserver.orchestrator.node_service import held_slots
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import EXPERIMENT_ENDED
from zeroserver.store.rows import AgentRow, read_rows
from zeroserver.store.schema import agents, experiments, pools, quotas

__all__ = ["agent_list", "pool_list", "pool_policies", "quota_limits"]


def agent_list(orchestrator: Orchestrator, connection: Connection) -> list[Agent]:
    """Return all agents with the runs on their slots."""
    used: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for row in held_slots(connection, OPEN_RUNS):
        for slot in msgspec.json.decode(row.slot_ids):
            used[row.agent_id][slot] = row.id
    rows = read_rows(connection, AgentRow, select(agents).order_by(agents.c.id))
    return [_agent(orchestrator, row, used[row.id]) for row in rows]


def _agent(orchestrator: Orchestrator, row: AgentRow, used: Mapping[int, int]) -> Agent:
    """Convert an agent to a resource; ``used`` maps slots to their runs."""
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


def pool_list(orchestrator: Orchestrator, connection: Connection) -> list[Pool]:
    """Return all pools that have agents, jobs, a policy or a quota."""
    policies = pool_policies(connection)
    limits = quota_limits(connection)
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


def pool_policies(connection: Connection) -> dict[str, Policy]:
    """Return the scheduling policies of pools by name."""
    return {row.name: Policy(row.policy) for row in connection.execute(select(pools))}


def quota_limits(connection: Connection) -> dict[str, int]:
    """Return the maximum number of slots of each quota by group."""
    return {row.group_name: row.max_slots for row in connection.execute(select(quotas))}
