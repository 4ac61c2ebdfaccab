"""Nodes of a run: one agent and its ranks each, and the merge of their exits."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, func, select, update

from zerolab.contract.messages import RunExit
from zerolab.contract.nodes import merge_outcomes
from zerolab.contract.outcome import CHECKPOINTED_EXITS, Outcome, failed_by_peer
from zerolab.contract.spec import Nodes
from zerolab.errors import NotFoundError
from zeroserver.orchestrator.service import Service
from zeroserver.store.database import Change
from zeroserver.store.rows import NodeRow, RunRow
from zeroserver.store.schema import agents, run_nodes, runs

__all__ = [
    "NodeService",
    "failed_before_its_kill",
    "held_slots",
    "host_of",
    "kills_others",
    "merge_ends",
    "next_log",
    "nodes_of",
]


class HeldSlots(NamedTuple):
    """Slots that a run holds on one agent."""

    id: int
    experiment_id: int
    agent_id: int
    slot_ids: str
    node_rank: int
    state: str
    directive: str
    killed: int


class RunNode(NodeRow, frozen=True, gc=False):
    """Node of a run, with the name and host of its agent if known."""

    name: str | None
    host: str | None


class NodeService(Service):
    """Spreads runs over several agents."""

    def spread(self, run_id: int, slots: Mapping[int, Sequence[int]], slots_per_rank: int) -> Nodes:
        """Store the nodes of a run on several agents; return them for its specification.

        Args:
            run_id: The run.
            slots: Agent to its slots, in the order of node ranks.
            slots_per_rank: Number of slots of each rank.
        """
        rows = [
            {
                "run_id": run_id,
                "node_rank": rank,
                "agent_id": agent_id,
                "slot_ids": msgspec.json.encode(ids).decode(),
                "next_log": 0,
                "told": 0,
            }
            for rank, (agent_id, ids) in enumerate(slots.items())
        ]
        self.work.connection.execute(run_nodes.insert(), rows)
        return Nodes(tuple(len(ids) // slots_per_rank for ids in slots.values()), 0, "", 0)

    def store_address(self, run_id: int, address: str) -> None:
        """Store the rendezvous address of a run's node 0 and wake the other agents.

        Raises:
            NotFoundError: If there is no such run, or it has only one agent.
        """
        self.work.find(RunRow, run_id)
        if not nodes_of(self.work.connection, run_id):
            msg = f"run {run_id} has one agent: it needs no rendezvous"
            raise NotFoundError(msg)
        first_node = (run_nodes.c.run_id == run_id) & (run_nodes.c.node_rank == 0)
        self.work.connection.execute(update(run_nodes).where(first_node).values(address=address))
        self.work.changes.append(Change("agents"))

    def save_next_log(self, run_id: int, node: int, number: int) -> None:
        """Store the number of the next log line of an agent."""
        connection = self.work.connection
        if node == 0:
            connection.execute(update(runs).where(runs.c.id == run_id).values(next_log=number))
            return
        same_node = (run_nodes.c.run_id == run_id) & (run_nodes.c.node_rank == node)
        connection.execute(update(run_nodes).where(same_node).values(next_log=number))


def held_slots(connection: Connection, states: Sequence[str]) -> list[HeldSlots]:
    """Return the slots held by all runs in some states: one item per run and agent.

    A run without an agent is outside of the scheduler and holds none.
    """
    query = (
        select(
            runs.c.id,
            runs.c.experiment_id,
            func.coalesce(run_nodes.c.agent_id, runs.c.agent_id),
            func.coalesce(run_nodes.c.slot_ids, runs.c.slot_ids),
            func.coalesce(run_nodes.c.node_rank, 0),
            runs.c.state,
            runs.c.directive,
            runs.c.killed,
        )
        .outerjoin(run_nodes, run_nodes.c.run_id == runs.c.id)
        .where(
            runs.c.state.in_(states), runs.c.agent_id.is_not(None) | run_nodes.c.run_id.is_not(None)
        )
        .order_by(runs.c.id, run_nodes.c.node_rank)
    )
    return [HeldSlots(*row) for row in connection.execute(query)]


def nodes_of(connection: Connection, run_id: int) -> list[RunNode]:
    """Return the nodes of a run by node rank; empty for a run on a single agent."""
    same_agent = agents.c.id == run_nodes.c.agent_id
    query = select(run_nodes, agents.c.name, agents.c.host).outerjoin(agents, same_agent)
    ordered = query.where(run_nodes.c.run_id == run_id).order_by(run_nodes.c.node_rank)
    return [RunNode(*row) for row in connection.execute(ordered)]


def merge_ends(rows: Sequence[RunNode], last: RunExit) -> RunExit:
    """Merge the exits of all agents of a run; ``last`` is the last reported one."""
    in_order = sorted(rows, key=lambda row: (row.ended_at, row.node_rank))
    ends = {row.name or f"node {row.node_rank}": _outcome(row) for row in in_order}
    name, outcome = merge_outcomes(ends)
    reason = outcome.reason and f"agent {name}: {outcome.reason}"
    return RunExit(outcome.exit_code, reason, last.log_tail)


def kills_others(row: RunNode) -> bool:
    """Check whether the failure of a node ends the other nodes of its run at once.

    Ranks that only lost a peer do not: the rank that failed may take longer to exit, and only its
    exit has the cause.
    """
    return _failed(row) and not failed_by_peer(_outcome(row))


def failed_before_its_kill(connection: Connection, run: RunRow) -> bool:
    """Check whether a node of a run had failed before the run was killed, or without a kill.

    That failure then ended the run, even if the run was asked to stop later.
    """
    killed_at = run.killed_at
    return any(
        _failed(row) and not row.told and (killed_at is None or (row.ended_at or 0.0) < killed_at)
        for row in nodes_of(connection, run.id)
    )


def _failed(row: RunNode) -> bool:
    return row.ended_at is not None and row.exit_code not in {0, *CHECKPOINTED_EXITS}


def _outcome(row: RunNode) -> Outcome:
    assert row.exit_code is not None, "the node has ended"
    return Outcome(row.exit_code, row.reason, was_stopped=bool(row.told))


def host_of(connection: Connection, run: RunRow, node: int) -> str | None:
    """Return the host of an agent of a run; None if the agent is gone."""
    of_run = select(agents.c.host).where(agents.c.id == run.agent_id)
    of_node = select(agents.c.host).join(run_nodes, run_nodes.c.agent_id == agents.c.id)
    query = (
        of_run
        if node == 0
        else of_node.where(run_nodes.c.run_id == run.id, run_nodes.c.node_rank == node)
    )
    return connection.execute(query).scalar_one_or_none()


def next_log(connection: Connection, run: RunRow, node: int) -> int:
    """Return the number of the next log line expected from a node of a run."""
    if node == 0:
        return int(run.next_log)
    query = select(run_nodes.c.next_log).where(
        run_nodes.c.run_id == run.id, run_nodes.c.node_rank == node
    )
    number = connection.execute(query).scalar_one_or_none()
    if number is None:
        msg = f"run {run.id} has no node {node}"
        raise NotFoundError(msg)
    return int(number)
