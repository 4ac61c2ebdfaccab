"""Agents and their slots."""

from typing import Literal

from zeroserver.api.rows import Resource, Time

__all__ = ["Agent", "AgentAnswer", "AgentPage", "Pool", "Slot"]


class Slot(Resource, frozen=True):
    """A device of an agent."""

    id: int
    """Number, from 0, on its agent."""
    device: str
    """`cpu`, or `cuda:0 NAME`."""
    run_id: int | None
    """The run that holds it."""
    enabled: bool
    """Whether new runs may start on it, as its owner says."""
    down: bool = False
    """Whether nothing can start on it now, for its agent's cluster has no node for it."""


class Agent(Resource, frozen=True):
    """A machine that offers slots."""

    id: int
    """Number, from 1."""
    name: str
    """The same name is the same agent."""
    host: str
    """Name of the machine."""
    pool: str
    """The resource pool that it has joined."""
    alive: bool
    """Whether it asks for work, or may yet."""
    state: Literal["ready", "draining", "disabled", "silent", "leaving", "gone"]
    """`ready` takes runs. `draining`: disabled, and runs still hold slots. `silent`: it has not
    asked for work for a while; its runs go on if it comes back in time. `gone`: given up."""
    enabled: bool
    """Whether new runs may start there, as its owner says."""
    silent_s: float
    """Seconds since it was heard of."""
    slots: list[Slot]
    """Its devices: `id`, `device`, `run_id` of the run that holds it, whether it is `enabled`, or
    `down`."""
    registered_at: Time
    """When it registered, the last time."""


class AgentAnswer(Resource, frozen=True):
    """One agent."""

    agent: Agent


class AgentPage(Resource, frozen=True):
    """All agents."""

    agents: list[Agent]
    next_after: None = None


class Pool(Resource, frozen=True):
    """Agents that are scheduled together."""

    name: str
    """Given with `zerolab agent start --pool`, and in `resources.resource_pool`."""
    policy: Literal["fair_share", "priority", "fifo"]
    """In which order its jobs start."""
    agents: int
    """Agents in it that are there."""
    slots: int
    """Their slots."""
    free_slots: int
    """Slots on which a run could start now."""
    jobs: int
    """Experiments in it that have not ended."""
    max_slots: int | None
    """Most slots that its jobs may hold together: its quota."""
