"""Who must make room for a trial that goes first."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerolab.scheduler.placement import share
from zerolab.scheduler.types import AgentSlots, Allocation, Job

__all__ = ["Limit", "victims"]

Limit = tuple[str, int]
"""A quota that counts for a job, and the most slots that it allows."""


@dataclass
class _Room:
    """What would be free for a job if only some runs stayed."""

    job: Job
    agents: Sequence[AgentSlots]
    limits: Sequence[Limit]
    limits_of: Callable[[Job], Sequence[Limit]]

    def __post_init__(self) -> None:
        self._usable = {agent.agent_id: frozenset(agent.slots) for agent in self.agents}
        self._free = Counter({agent: len(slots) for agent, slots in self._usable.items()})
        self._used: Counter[str] = Counter()

    def hold(self, run: Allocation, sign: int = 1) -> None:
        """Count a run as there (1), or as gone (-1)."""
        for agent, slots in run.slots.items():
            if agent in self._usable:
                self._free[agent] -= sign * len(self._usable[agent].intersection(slots))
        for group, _ in self.limits_of(run.job):
            self._used[group] += sign * sum(map(len, run.slots.values()))

    def fits(self) -> bool:
        """Whether the job's trial could start."""
        return not self._full() and self._placeable()

    def is_helped_by(self, run: Allocation) -> bool:
        """Whether it would be nearer to that without ``run``."""
        there = any(
            self._usable.get(agent, frozenset()) & {*ids} for agent, ids in run.slots.items()
        )
        return there or any(group in self._full() for group, _ in self.limits_of(run.job))

    def _full(self) -> set[str]:
        need = self.job.slots
        return {group for group, most in self.limits if self._used[group] + need > most}

    def _placeable(self) -> bool:
        job = self.job
        kinds: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for agent in self.agents:
            kinds[agent.kind][agent.agent_id] = self._free[agent.agent_id]
        most = 1 if job.single_agent else job.max_agents
        return any(
            share(job.slots, free, max_agents=most, unit=job.unit) is not None
            for free in kinds.values()
        )


def victims(
    job: Job,
    agents: Sequence[AgentSlots],
    held: Sequence[Allocation],
    limits_of: Callable[[Job], Sequence[Limit]],
    may_be_asked: Callable[[Job], bool],
) -> list[int] | None:
    """The runs to preempt so that a trial of ``job`` fits; None when that would not help.

    None are needed where it fits as soon as those have left that were asked before.

    The newest of the least important are asked, and no more than needed: where some of those may
    stay after all, the most important and oldest do.

    Args:
        job: Whose trial goes first.
        agents: Those on which it may run.
        held: All runs that have not been asked to leave yet.
        limits_of: The quotas that count for a job.
        may_be_asked: Whether a job's runs may be preempted at all.
    """
    room = _Room(job, agents, limits_of(job), limits_of)
    for run in held:
        room.hold(run)
    if room.fits():
        return []  # what was asked to stop already makes room
    lower = [run for run in held if run.job.priority > job.priority and may_be_asked(run.job)]
    lower.sort(key=lambda run: (-run.job.priority, -run.run_id))
    asked: list[Allocation] = []
    for run in filter(room.is_helped_by, lower):
        asked.append(run)
        room.hold(run, -1)
        if room.fits():
            break
    else:
        return None
    spared = {run.run_id for run in reversed(asked) if _spared(run, room)}
    return [run.run_id for run in asked if run.run_id not in spared]


def _spared(run: Allocation, room: _Room) -> bool:
    """Let a run stay if the rest is enough."""
    room.hold(run)
    if room.fits():
        return True
    room.hold(run, -1)
    return False
