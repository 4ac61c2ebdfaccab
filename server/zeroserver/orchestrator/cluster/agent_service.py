"""Agents: registration, loss and return, departure, and closing by users."""

import time
from collections.abc import Collection

import msgspec
from sqlalchemy import delete, select, update

from zerolab.contract.limits import SLOTS
from zerolab.contract.messages import AgentRegistration, RunExit
from zerolab.contract.names import check_pool, text_problem
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED
from zerolab.errors import ConfigError, ConflictError
from zeroserver.orchestrator.cluster.scheduler_input import OPEN_RUNS
from zeroserver.orchestrator.exit_service import ExitService
from zeroserver.orchestrator.node_service import HeldSlots, held_slots
from zeroserver.orchestrator.run_service import RunService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.orchestrator.state import Orchestrator, agents_changed
from zeroserver.states import RunState
from zeroserver.store.rows import AgentRow, read_row
from zeroserver.store.schema import agents, run_nodes, runs

__all__ = ["AgentService", "check"]

_NAME_CHARACTERS = 255
_RUNS_AT_ONCE = 32
"""Maximum number of runs of lost agents that one transaction ends."""
_PREEMPTED_AT_ONCE = 200
"""Maximum number of runs that one transaction preempts."""


class AgentService(Service):
    """Registers, closes and removes agents."""

    runs = Uses(RunService)
    exits = Uses(ExitService)

    def join(self, agent: AgentRegistration) -> int:
        """Register an agent, or the same one again; return its id.

        Slots that a user has disabled stay disabled.

        Raises:
            ConflictError: If another live agent has that name.
        """
        query = select(agents).where(agents.c.name == agent.name)
        registered = read_row(self.work.connection, AgentRow, query)
        values = {
            "host": agent.host,
            "pool": agent.pool,
            "identity": agent.identity,
            "slots": msgspec.json.encode(agent.slots).decode(),
            "alive": 1,
            "leaving": 0,
            "registered_at": self.work.clock(),
        }
        if registered is None:
            statement = agents.insert().values(name=agent.name, **values).returning(agents.c.id)
            agent_id = int(self.work.connection.execute(statement).scalar_one())
        else:
            _check_same(self.work.orchestrator, registered, agent)
            agent_id = registered.id
            self.work.save(agents, agent_id, **values)
        self.work.orchestrator.agents.seen[agent_id] = time.monotonic()
        self.work.changes.append(agents_changed())
        return agent_id

    def revive(self, agent_id: int) -> None:
        """Mark an agent as alive again after it has requested work."""
        self.work.save(agents, agent_id, alive=1, leaving=0)
        self.work.changes.append(agents_changed())

    def leave(self, agent_id: int, *, done: bool) -> bool:
        """Let an agent leave: it gets no new runs and counts as gone after its last one.

        Args:
            agent_id: The agent.
            done: Whether its runs have ended; runs that the server still lists as open are lost.

        Returns:
            Whether all its runs were processed; else call it again.

        Raises:
            NotFoundError: If there is no such agent.
        """
        agent = self.work.find(AgentRow, agent_id)
        self.work.save(agents, agent_id, leaving=1)
        self.work.changes.append(agents_changed())
        if not done:
            return True
        reason = f"agent {agent.name} has left"
        return self._give_up(agent_id, reason, _RUNS_AT_ONCE) <= _RUNS_AT_ONCE

    def lose_silent(self) -> None:
        """Mark silent agents as lost and end their runs; their trials restart elsewhere."""
        timeout = self.work.settings.timings.agent_dead_s
        alive = self.work.connection.execute(
            select(agents.c.id, agents.c.name).where(agents.c.alive == 1)
        ).all()
        remaining = _RUNS_AT_ONCE
        for agent_id, name in alive:
            if self.work.orchestrator.agents.silence_s(agent_id) > timeout:
                reason = f"agent {name} has sent no heartbeat for {timeout:g} s"
                remaining -= self._give_up(agent_id, reason, remaining)
                if remaining < 0:
                    self.work.orchestrator.queue.unfinished = True
                    return

    def _give_up(self, agent_id: int, reason: str, limit: int) -> int:
        """End up to ``limit`` runs of a lost agent; return how many it had.

        The agent counts as alive until all its runs have ended. Nothing starts there, since it is
        silent or leaving.
        """
        open_runs = self._open_runs(agent_id)
        if len(open_runs) <= limit:
            self.work.save(agents, agent_id, alive=0, leaving=0)
        for run in open_runs[:limit]:
            # A run that never started does not count as a failure. If a run has several agents, the
            # loss of one ends the others.
            code = EXIT_PREEMPTED if run.state == RunState.ASSIGNED else EXIT_INFRASTRUCTURE
            end = RunExit(code, reason, node=run.node_rank)
            self.exits.end_run(run.id, end)
        return len(open_runs)

    def _open_runs(self, agent_id: int) -> list[HeldSlots]:
        rows = held_slots(self.work.connection, OPEN_RUNS)
        return [row for row in rows if row.agent_id == agent_id]

    def close(
        self,
        agent_id: int,
        slots: Collection[int] | None,
        *,
        drain: bool,
    ) -> bool:
        """Disable an agent or some of its slots: no new runs start there.

        Args:
            agent_id: The agent.
            slots: Ids of the slots; None for the whole agent.
            drain: Let its runs finish; else they checkpoint now and continue elsewhere.

        Returns:
            Whether all its runs were processed; else call it again.

        Raises:
            NotFoundError: If there is no such agent.
            ConfigError: If it has no such slot.
        """
        agent = self.work.find(AgentRow, agent_id)
        if slots is None:
            self.work.save(agents, agent_id, enabled=0)
        else:
            self._save_disabled(agent, _disabled(agent) | _checked(agent, slots))
        is_done = True
        if not drain:
            leaving = [
                run
                for run in self._open_runs(agent_id)
                if run.directive == "train"
                and (slots is None or not set(slots).isdisjoint(msgspec.json.decode(run.slot_ids)))
            ]
            homes = (run.experiment_id for run in leaving)
            most = self.work.orchestrator.configs.affordable(homes, _PREEMPTED_AT_ONCE)
            for run in leaving[:most]:
                self.runs.direct(run.id, "preempt")
            is_done = len(leaving) <= most
        self.work.changes.append(agents_changed())
        return is_done

    def reopen(self, agent_id: int, slots: Collection[int] | None) -> None:
        """Enable an agent or some of its slots; preempted runs still exit.

        Raises:
            NotFoundError: If there is no such agent.
            ConfigError: If it has no such slot.
        """
        agent = self.work.find(AgentRow, agent_id)
        if slots is None:
            self.work.save(agents, agent_id, enabled=1)
        else:
            self._save_disabled(agent, _disabled(agent) - _checked(agent, slots))
        self.work.changes.append(agents_changed())

    def _save_disabled(self, agent: AgentRow, disabled: set[int]) -> None:
        text = msgspec.json.encode(sorted(disabled)).decode()
        self.work.save(agents, agent.id, disabled_slots=text)

    def remove(self, agent_id: int) -> None:
        """Delete an agent that is not alive; its runs stay in the history.

        Raises:
            NotFoundError: If there is no such agent.
            ConflictError: If it is alive.
        """
        agent = self.work.find(AgentRow, agent_id)
        if agent.alive:
            msg = (
                f"agent {agent.name} is connected; stop it first, on {agent.host}, "
                "or disable it: `zerolab agent disable`"
            )
            raise ConflictError(msg)
        connection = self.work.connection
        for table in (runs, run_nodes):
            of_agent = update(table).where(table.c.agent_id == agent_id)
            connection.execute(of_agent.values(agent_id=None))
        connection.execute(delete(agents).where(agents.c.id == agent_id))
        self.work.orchestrator.agents.forget(agent_id)
        self.work.changes.append(agents_changed())


def check(agent: AgentRegistration) -> None:
    """Validate the registration of an agent.

    Raises:
        ConfigError: If a value is invalid; the error lists all of them.
    """
    problems = [
        f"{key}: {problem}"
        for key, text in (
            ("name", agent.name), ("host", agent.host), ("identity", agent.identity),
            *(("slots: device", slot.device) for slot in agent.slots[:SLOTS]),
        )
        if (problem := _name_problem(text, required=key == "name"))
    ][:10]  # fmt: skip
    ids = [slot.id for slot in agent.slots]
    if len(ids) > SLOTS:
        problems.append(f"slots: must be at most {SLOTS:,}, got {len(ids):,}")
    elif len(set(ids)) != len(ids) or not all(0 <= id_ < 2**31 for id_ in ids):
        problems.append(f"slots: ids must be different and at least 0, got {ids[:20]}")
    nodes = [slot.node for slot in agent.slots if slot.node is not None]
    if not all(0 <= node < 2**31 for node in nodes):
        problems.append(f"slots: node must be at least 0, got {min(nodes)}")
    try:
        check_pool(agent.pool)
    except ValueError as error:
        problems.append(f"pool: {error}")
    if problems:
        raise ConfigError("agent", problems)


def _name_problem(text: str, *, required: bool) -> str | None:
    if not required <= len(text) <= _NAME_CHARACTERS:
        shown = f"{text[:50]!r}... ({len(text)} characters)" if text else "''"
        return f"must have {int(required)} to {_NAME_CHARACTERS} characters, got {shown}"
    return text_problem(text)


def _check_same(orchestrator: Orchestrator, registered: AgentRow, agent: AgentRegistration) -> None:
    """Refuse a second live agent with the same name, since each would execute the other's runs.

    Raises:
        ConflictError: If the registered agent is alive and has another identity.
    """
    conflict = bool(registered.alive) and registered.identity and agent.identity
    if conflict and registered.identity != agent.identity:
        silent = orchestrator.agents.silence_s(registered.id)
        msg = (
            f"another agent named {agent.name} is connected from {registered.host} (last heartbeat "
            f"{silent:.0f} s ago); start this agent with another --name"
        )
        raise ConflictError(msg)


def _disabled(agent: AgentRow) -> set[int]:
    return set(msgspec.json.decode(agent.disabled_slots))


def _checked(agent: AgentRow, slots: Collection[int]) -> set[int]:
    """Check that slots belong to an agent, and return them.

    Raises:
        ConfigError: If it has no such slot.
    """
    slot_ids = {slot["id"] for slot in msgspec.json.decode(agent.slots)}
    unknown = sorted(set(slots) - slot_ids)
    if unknown:
        listed = ", ".join(map(str, sorted(slot_ids))) or "none"
        problem = f"slots: must be slots of agent {agent.name} ({listed}), got {unknown}"
        raise ConfigError("request", [problem])
    return set(slots)
