"""Queries of agents and pools as resources, without a query in a loop."""

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from zerolab.scheduler import DEFAULT_POOL, Policy
from zeroserver.api.resources import Agent, MachineLoad, Pool, Slot, SlotHistory, SlotUse
from zeroserver.orchestrator.cluster.scheduler_input import OPEN_RUNS, down_slots, why_closed
from zeroserver.orchestrator.node_service import held_slots
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import EXPERIMENT_ENDED
from zeroserver.store.rows import AgentRow, read_rows
from zeroserver.store.schema import agents, experiments, pools, quotas, runs

__all__ = ["agent_list", "load_history", "pool_list", "pool_policies", "quota_limits"]


def agent_list(orchestrator: Orchestrator, connection: Connection) -> list[Agent]:
    """Return all agents with the runs on their slots."""
    used: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for row in held_slots(connection, OPEN_RUNS):
        for slot in msgspec.json.decode(row.slot_ids):
            used[row.agent_id][slot] = row.id
    rows = read_rows(connection, AgentRow, select(agents).order_by(agents.c.id))
    uses = _run_fields(orchestrator, connection) if used else {}
    return [_agent(orchestrator, row, used[row.id], uses) for row in rows]


def _run_fields(orchestrator: Orchestrator, connection: Connection) -> dict[int, dict[str, Any]]:
    """Return fields of slots by the run that holds them, without runs that the caller must not see.

    The query reads the table of experiments, of which the caller sees only some rows.
    """
    columns = experiments.c
    query = (
        select(runs.c.id, runs.c.trial_id, columns.id, columns.name, columns.owner_id)
        .join(experiments, columns.id == runs.c.experiment_id)
        .where(runs.c.state.in_(OPEN_RUNS))
    )
    return {
        run_id: {
            "trial_id": trial_id,
            "experiment_id": experiment_id,
            "experiment": name,
            "owner": orchestrator.users.shown_owner(owner_id),
        }
        for run_id, trial_id, experiment_id, name, owner_id in connection.execute(query)
    }


def _agent(
    orchestrator: Orchestrator,
    row: AgentRow,
    used: Mapping[int, int],
    uses: Mapping[int, Mapping[str, Any]],
) -> Agent:
    """Convert an agent to a resource.

    Args:
        orchestrator: State of the server.
        row: The agent.
        used: Slot to the run that holds it.
        uses: Run to fields of its slots.
    """
    reported = msgspec.json.decode(row.slots)
    down = down_slots(reported, used)
    disabled = set(msgspec.json.decode(row.disabled_slots))
    load = orchestrator.agents.load_of(row.id) if row.alive else None
    loads = {slot.id: SlotUse.of(slot) for slot in load.slots} if load else {}
    slots = [
        Slot(
            id=slot["id"],
            device=slot["device"],
            run_id=used.get(slot["id"]),
            enabled=bool(row.enabled) and slot["id"] not in disabled,
            down=slot["id"] in down,
            load=loads.get(slot["id"]),
            **uses.get(used.get(slot["id"], 0), {}),
        )
        for slot in reported
    ]
    state = _state(orchestrator, row, busy=bool(used))
    silent_s = round(orchestrator.agents.silence_s(row.id), 1)
    machine = None if load is None else MachineLoad.of(load)
    return Agent.of(row, slots=slots, state=state, silent_s=silent_s, load=machine)


def load_history(orchestrator: Orchestrator, connection: Connection) -> list[SlotHistory]:
    """Return the load of the slots in the last hour, by agent and slot.

    Slots without any load are left out.
    """
    history, now = orchestrator.agents.history, time.monotonic()
    query = select(agents.c.id, agents.c.slots).order_by(agents.c.id)
    return [
        SlotHistory(agent_id, slot["id"], gpu, means)
        for agent_id, slots in connection.execute(query)
        for slot in msgspec.json.decode(slots)
        for gpu, means in [history.hour(agent_id, slot["id"], now)]
        if means
    ]


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
