"""What the scheduler is told and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["AgentSlots", "Allocation", "Decision", "Request"]


@dataclass(frozen=True)
class AgentSlots:
    """The slots of one agent that may be used."""

    agent_id: int
    slots: tuple[int, ...]
    """Ids of all its slots, held or free."""
    kind: str = "cpu"
    """What they are: ``cpu`` or ``cuda``. A trial's slots are all of one kind."""


@dataclass(frozen=True)
class Request:
    """A trial that wants to run, or runs."""

    trial_id: int
    experiment_id: int
    slots: int
    """All of them at once, or none."""
    order: int
    """When it was asked for; a smaller number came first."""
    priority: int = 42
    """1 to 99; a smaller number goes first."""
    weight: float = 1.0
    """Share of its experiment, against others of the same priority."""
    max_slots: int | None = None
    """Most slots that its experiment may hold."""
    single_agent: bool = False
    """Whether all slots must be on one agent."""
    excluded: frozenset[int] = frozenset()
    """Agents on which it must not run."""


@dataclass(frozen=True)
class Allocation:
    """The slots that a trial holds."""

    request: Request
    slots: Mapping[int, tuple[int, ...]]
    """Agent id to slot ids."""
    stopping: bool = False
    """Whether it was asked to give them back."""


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    start: list[Allocation] = field(default_factory=list)
    """Trials to start, on these slots."""
    preempt: list[int] = field(default_factory=list)
    """Ids of trials to preempt."""
    impossible: list[int] = field(default_factory=list)
    """Ids of trials that want more than all agents have together."""
    waiting: dict[int, str] = field(default_factory=dict, compare=False)
    """Trial to the reason for which it does not start now, in words; every one that waits."""
