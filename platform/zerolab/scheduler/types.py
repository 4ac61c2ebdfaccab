"""Input and output types of the scheduler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from zerolab.contract.names import DEFAULT_POOL

__all__ = [
    "DEFAULT_POOL",
    "HOST_SLOT",
    "Account",
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
"""Prefix of a group that is one slot of a machine without an agent, such as ``host:worker-1:0``;
its quota is 1."""

Account = tuple[str, str]
"""Pool and user, who share its slots with other users."""

Shape = tuple[int, int | None, bool, int]
"""Slots, maximum number of agents, whether on one agent only, slots of a rank."""


class Policy(StrEnum):
    """Order in which the jobs of a pool start."""

    FAIR_SHARE = "fair_share"
    """By priority; within a priority, jobs of the user with the least usage for the user's weight;
    of those the job with the fewest slots for its weight; then by position."""
    PRIORITY = "priority"
    """By priority; within a priority by position."""
    FIFO = "fifo"
    """By position; priority and weight are ignored, and nothing is preempted."""


class AgentSlots(msgspec.Struct, frozen=True):
    """Usable slots of one agent."""

    agent_id: int
    slots: tuple[int, ...]
    """Ids of all its slots that are enabled, held or free."""
    kind: str = "cpu"
    """Kind of the slots: ``cpu`` or ``cuda``. A trial's slots are all of one kind."""
    pool: str = DEFAULT_POOL
    name: str = ""
    """Name shown in reasons."""
    closed: str = ""
    """Reason why no trial starts there, such as ``is disabled``; empty when trials may start."""
    disabled: int = 0
    """Number of additional slots that are disabled."""
    down: int = 0
    """Number of additional slots whose cluster has no node at present."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Experiment in the queue: the common properties of its trials."""

    job_id: int
    slots: int
    """Slots of each trial: all at once, or none."""
    position: float
    """Position in the queue; smaller numbers are first."""
    pool: str = DEFAULT_POOL
    priority: int = 42
    """1 to 99; smaller numbers start first."""
    weight: float = 1.0
    """Share of its user's slots, relative to others of the same priority."""
    owner: str = ""
    """User to whom it belongs."""
    max_slots: int | None = None
    """Maximum number of slots that its trials may hold together."""
    max_slots_key: str = "resources.max_slots"
    """Configuration key of ``max_slots``."""
    slots_key: str = "resources.slots_per_trial"
    """Configuration key, or option of the command, that sets the number of slots."""
    groups: tuple[str, ...] = ()
    """Groups that a quota may name: ``pool:default``, ``label:vision``, ``user:ann``,
    ``project:nlp``; also the slots of a hostfile that each of its trials uses
    (:data:`HOST_SLOT`)."""
    single_agent: bool = False
    """Whether all slots of a trial must be on one agent."""
    max_agents: int | None = None
    """Maximum number of agents for its slots; unlimited when None."""
    unit: int = 1
    """Slots of one rank, which must be on one agent; ``slots`` is a multiple."""
    fewer: tuple[int, ...] = ()
    """Smaller numbers of slots with which a trial may start, largest first."""

    @property
    def account(self) -> Account:
        """Pool and user whose usage it increases."""
        return self.pool, self.owner

    @property
    def shape(self) -> "Shape":
        """Properties that determine on which agents a trial fits."""
        return self.slots, self.max_agents, self.single_agent, self.unit


class Request(NamedTuple):
    """Identical trials of one job that wait to run."""

    trial_id: int
    """Number of the first trial."""
    job: Job
    trials: int = 1
    """Number of trials."""
    excluded: frozenset[int] = frozenset()
    """Agents on which they must not run."""


class Allocation(msgspec.Struct, frozen=True):
    """Slots that a run holds."""

    run_id: int
    """Larger numbers are newer runs."""
    job: Job
    slots: Mapping[int, tuple[int, ...]]
    """Agent id to slot ids."""
    stopping: bool = False
    """Whether it was asked to stop."""


class Cluster(msgspec.Struct, frozen=True):
    """Agents, policies and quotas."""

    agents: Sequence[AgentSlots]
    policies: Mapping[str, Policy] = msgspec.field(default_factory=dict)
    """Policy by pool; fair share for other pools."""
    quotas: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Group to the maximum number of slots that its jobs may hold together."""
    weights: Mapping[str, float] = msgspec.field(default_factory=dict)
    """User to the share of the slots, relative to other users; 1 for other users."""
    usage: Mapping[Account, float] = msgspec.field(default_factory=dict)
    """Recent usage of a pool by a user, in slot-seconds
    (:class:`~zerolab.scheduler.usage.RecentUsage`)."""

    def policy(self, pool: str) -> Policy:
        """Return the policy of a pool."""
        return self.policies.get(pool, Policy.FAIR_SHARE)


class Start(NamedTuple):
    """Trial of a request that starts now."""

    request: Request
    slots: Mapping[int, tuple[int, ...]]
    """Agent id to slot ids."""
    before: int | None = None
    """Waiting job that is before it in the queue, and that it does not delay."""


@dataclass(frozen=True)
class Decision:
    """Result of a scheduling round."""

    start: list[Start] = field(default_factory=list)
    """Trials to start; repeated requests start their first trials."""
    preempt: list[int] = field(default_factory=list)
    """Ids of runs to preempt."""
    impossible: list[int] = field(default_factory=list)
    """Requests, by trial, that exceed the agents or a quota."""
    waiting: dict[int, str] = field(default_factory=dict, compare=False)
    """Request, by trial, to the reason why its (next) trial does not start now."""
