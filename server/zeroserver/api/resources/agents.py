"""Agents, slots and pools."""

from typing import Literal

from zeroserver.api.rows import Resource, Time

__all__ = ["Agent", "AgentAnswer", "AgentPage", "Pool", "Slot"]


class Slot(Resource, frozen=True):
    """Device of an agent."""

    id: int
    """Number on its agent, from 0."""
    device: str
    """`cpu`, or `cuda:0 NAME`."""
    run_id: int | None
    """Run that holds it."""
    enabled: bool
    """Whether users allow new runs on it."""
    down: bool = False
    """Whether the cluster of its agent has lost the node, so that nothing can start on it."""


class Agent(Resource, frozen=True):
    """Machine that offers slots."""

    id: int
    """Id, from 1."""
    name: str
    """Unique name."""
    host: str
    """Name of the machine."""
    pool: str
    """Resource pool."""
    alive: bool
    """Whether it is not lost."""
    state: Literal["ready", "draining", "disabled", "silent", "leaving", "gone"]
    """`ready`: accepts runs. `draining`: disabled, but runs still hold slots. `silent`: has not
    requested work for a while; its runs continue if it returns in time. `gone`: lost."""
    enabled: bool
    """Whether users allow new runs on it."""
    silent_s: float
    """Seconds since its last request."""
    slots: list[Slot]
    """Its devices: `id`, `device`, `run_id` of the run that holds it, `enabled`, `down`."""
    registered_at: Time
    """Time of its last registration."""


class AgentAnswer(Resource, frozen=True):
    """Response with one agent."""

    agent: Agent


class AgentPage(Resource, frozen=True):
    """Response with all agents."""

    agents: list[Agent]
    next_after: None = None


class Pool(Resource, frozen=True):
    """Agents that are scheduled together."""

    name: str
    """Name, as in `zerolab agent start --pool` and `resources.resource_pool`."""
    policy: Literal["fair_share", "priority", "fifo"]
    """Order in which its jobs start."""
    agents: int
    """Number of its live agents."""
    slots: int
    """Number of their slots."""
    free_slots: int
    """Number of slots on which a run could start now."""
    jobs: int
    """Number of its experiments that have not ended."""
    max_slots: int | None
    """Quota: maximum number of slots that its jobs may hold together."""
