"""What the scheduler is told and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from zerolab.contract.names import DEFAULT_POOL

__all__ = [
    "DEFAULT_POOL",
    "HOST_SLOT",
    "AgentSlots",
    "Allocation",
    "Cluster",
    "Decision",
    "Job",
    "Policy",
    "Request",
    "Shape",
    "Start",
]


HOST_SLOT = "host:"
"""With what the name of a group begins that is one slot of a machine that no agent offers, as
``host:worker-1:0``: its quota is 1."""

Shape = tuple[int, int | None, bool, int]
"""Slots, most agents, whether one agent only, slots of a rank."""


class Policy(StrEnum):
    """In which order the jobs of a pool start."""

    FAIR_SHARE = "fair_share"
    """By priority; at one priority, who holds the fewest slots for its weight; then as queued."""
    PRIORITY = "priority"
    """By priority; at one priority as queued."""
    FIFO = "fifo"
    """As queued; priority and weight have no say, and nobody is asked to make room."""


@dataclass(frozen=True)
class AgentSlots:
    """The slots of one agent that may be used."""

    agent_id: int
    slots: tuple[int, ...]
    """Ids of all its slots that are enabled, held or free."""
    kind: str = "cpu"
    """What they are: ``cpu`` or ``cuda``. A trial's slots are all of one kind."""
    pool: str = DEFAULT_POOL
    name: str = ""
    """For the reasons."""
    closed: str = ""
    """Why nothing new starts there, e.g. ``is disabled``; empty when it may."""
    disabled: int = 0
    """How many slots it has besides, which are disabled."""
    down: int = 0
    """How many it has besides for which its cluster has no node now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An experiment in the queue: what all its trials have in common."""

    job_id: int
    slots: int
    """Of each trial: all of them at once, or none."""
    position: float
    """Place in the queue; a smaller number is before a larger one."""
    pool: str = DEFAULT_POOL
    priority: int = 42
    """1 to 99; a smaller number goes first."""
    weight: float = 1.0
    """Share of the slots, against others of the same priority."""
    max_slots: int | None = None
    """Most slots that its trials may hold together."""
    bounded_by: str = "resources.max_slots"
    """The key of its configuration that says so."""
    slots_asked_by: str = "resources.slots_per_trial"
    """The key of its configuration, or the option of the command, that says how many slots."""
    groups: tuple[str, ...] = ()
    """What it belongs to and a quota may name: ``pool:default``, ``label:vision``;
    and the slots of a hostfile that each of its trials takes (:data:`HOST_SLOT`)."""
    single_agent: bool = False
    """Whether all slots of a trial must be on one agent."""
    max_agents: int | None = None
    """Most agents over which its slots may lie; any number when None."""
    unit: int = 1
    """Slots of one rank, which must lie on one agent; ``slots`` is a multiple."""
    fewer: tuple[int, ...] = ()
    """With how many slots a trial starts, too, where ``slots`` are not free; the largest first."""

    @property
    def shape(self) -> "Shape":
        """What decides where a trial fits, and for how many slots it counts."""
        return self.slots, self.max_agents, self.single_agent, self.unit


class Request(NamedTuple):
    """Trials of one job that want to run, all alike."""

    trial_id: int
    """The first of them; each has a number of its own."""
    job: Job
    trials: int = 1
    """How many they are."""
    excluded: frozenset[int] = frozenset()
    """Agents on which they must not run."""


@dataclass(frozen=True)
class Allocation:
    """The slots that a run holds."""

    run_id: int
    """A larger number is a newer run."""
    job: Job
    slots: Mapping[int, tuple[int, ...]]
    """Agent id to slot ids."""
    stopping: bool = False
    """Whether it was asked to give them back."""


@dataclass(frozen=True)
class Cluster:
    """What there is to run on, and by which rules."""

    agents: Sequence[AgentSlots]
    policies: Mapping[str, Policy] = field(default_factory=dict)
    """By pool; fair share where none is named."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Group to the most slots that all its jobs may hold together."""

    def policy(self, pool: str) -> Policy:
        """The policy of a pool."""
        return self.policies.get(pool, Policy.FAIR_SHARE)


class Start(NamedTuple):
    """One trial of a request that starts now."""

    request: Request
    slots: Mapping[int, tuple[int, ...]]
    """Agent id to slot ids."""
    before: int | None = None
    """The job that waits and is before it in the queue, which it does not delay."""


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    start: list[Start] = field(default_factory=list)
    """Trials to start; a request has so many of them as it stands here, its first ones."""
    preempt: list[int] = field(default_factory=list)
    """Ids of runs to preempt."""
    impossible: list[int] = field(default_factory=list)
    """Requests, by trial, that want more than there is or may ever have."""
    waiting: dict[int, str] = field(default_factory=dict, compare=False)
    """Request, by trial, to the reason why its (next) trial does not start now, in words."""
