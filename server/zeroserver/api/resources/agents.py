"""Agents, slots and pools."""

from typing import Literal

from zeroserver.api.rows import Resource, Time

__all__ = [
    "Agent",
    "AgentAnswer",
    "AgentPage",
    "LoadHistoryAnswer",
    "MachineLoad",
    "Pool",
    "Slot",
    "SlotHistory",
    "SlotUse",
]


class SlotUse(Resource, frozen=True):
    """Load of a slot, as its agent measured it."""

    cpu_percent: float | None
    """CPU time of the processes of its run; 100 is one core. Null if none runs."""
    memory_bytes: int | None
    """Resident memory of these processes; pages that they share count for each one."""
    gpu_percent: float | None
    """Utilization of the GPU by any program; null without a GPU, or if it does not report it."""
    gpu_memory_bytes: int | None
    """Used memory of the GPU."""
    gpu_memory_total_bytes: int | None
    """Memory of the GPU."""


class MachineLoad(Resource, frozen=True):
    """Load of an agent's machine."""

    cpu_percent: float
    """CPU time of all programs, of all cores together: at most 100."""
    cores: int
    """Number of CPU cores."""
    memory_bytes: int
    """Memory in use."""
    memory_total_bytes: int
    """Memory of the machine."""
    disk_bytes: int
    """Used bytes of the file system with the agent's data directory."""
    disk_total_bytes: int
    """Size of that file system."""


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
    experiment_id: int | None = None
    """Experiment of the run; null if the caller may not see it."""
    experiment: str | None = None
    """Name of the experiment."""
    trial_id: int | None = None
    """Trial of the run."""
    owner: str | None = None
    """Owner of the experiment; null if the installation has only one user."""
    load: SlotUse | None = None
    """Newest load; null if the agent did not report any within a minute."""


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
    """Its devices: `id`, `device`, `enabled`, `down`, and the run that holds it: `run_id`,
    `trial_id`, `experiment_id`, `experiment`, `owner`, `load`."""
    registered_at: Time
    """Time of its last registration."""
    load: MachineLoad | None = None
    """Newest load of the machine; null if the agent did not report any within a minute."""


class AgentAnswer(Resource, frozen=True):
    """Response with one agent."""

    agent: Agent


class AgentPage(Resource, frozen=True):
    """Response with all agents."""

    agents: list[Agent]
    next_after: None = None


class SlotHistory(Resource, frozen=True):
    """Load of a slot in the last hour."""

    agent_id: int
    """Agent of the slot."""
    slot: int
    """Number of the slot on its agent."""
    gpu: bool
    """Whether the load is the utilization of the GPU; else CPU time of the slot's run (100 is one
    core)."""
    percent: list[float | None]
    """Mean of each minute, oldest first; the last one is the current minute. Null for a minute
    without a measurement."""


class LoadHistoryAnswer(Resource, frozen=True):
    """Load of the slots in the last hour, as far as the server has run."""

    history: list[SlotHistory]


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
