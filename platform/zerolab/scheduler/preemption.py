"""Choice of the runs that are preempted for a trial."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerolab.scheduler.placement import share
from zerolab.scheduler.types import AgentSlots, Allocation, Job

__all__ = ["Limit", "victims"]

Limit = tuple[str, int]
"""Quota that applies to a job, and its maximum number of slots."""


@dataclass
class _Capacity:
    """Capacity for a job if only some runs stayed."""

    job: Job
    agents: Sequence[AgentSlots]
    limits: Sequence[Limit]
    limits_of: Callable[[Job], Sequence[Limit]]

    def __post_init__(self) -> None:
        self._usable = {agent.agent_id: frozenset(agent.slots) for agent in self.agents}
        self._free = Counter({agent: len(slots) for agent, slots in self._usable.items()})
        self._used: Counter[str] = Counter()

    def hold(self, run: Allocation, sign: int = 1) -> None:
        """Add a run (1) or remove it (-1)."""
        for agent, slots in run.slots.items():
            if agent in self._usable:
                self._free[agent] -= sign * len(self._usable[agent].intersection(slots))
        for group, _ in self.limits_of(run.job):
            self._used[group] += sign * sum(map(len, run.slots.values()))

    def fits(self) -> bool:
        """Whether the job's trial could start."""
        return not self._full() and self._placeable()

    def is_blocked_by(self, run: Allocation) -> bool:
        """Whether the job's trial would be closer to starting without ``run``."""
        holds_slots = any(
            self._usable.get(agent, frozenset()) & {*ids} for agent, ids in run.slots.items()
        )
        return holds_slots or any(group in self._full() for group, _ in self.limits_of(run.job))

    def _full(self) -> set[str]:
        need = self.job.slots
        return {group for group, limit in self.limits if self._used[group] + need > limit}

    def _placeable(self) -> bool:
        job = self.job
        kinds: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for agent in self.agents:
            kinds[agent.kind][agent.agent_id] = self._free[agent.agent_id]
        limit = 1 if job.single_agent else job.max_agents
        return any(
            share(job.slots, free, max_agents=limit, unit=job.unit) is not None
            for free in kinds.values()
        )


def victims(
    job: Job,
    agents: Sequence[AgentSlots],
    runs: Sequence[Allocation],
    limits_of: Callable[[Job], Sequence[Limit]],
    is_preemptible: Callable[[Job], bool],
) -> list[int] | None:
    """Return the runs to preempt so that a trial of ``job`` fits, or None if that is impossible.

    The list is empty if the stopping runs free enough. The newest runs of the lowest priority are
    chosen, and no more than needed: the most important and oldest runs are spared first.

    Runs are first removed in that order until the trial fits. The last one may free so much that
    earlier ones were removed for nothing, for example on another agent. So each is put back, the
    most important first, if the trial still fits with it. The result is minimal: without any one
    of the preemptions the trial would not fit. It need not be the smallest set; finding that is a
    search over all subsets.

    Args:
        job: Job whose trial is first in the queue.
        agents: Agents on which it may run.
        runs: All runs that are not stopping.
        limits_of: Returns the quotas that apply to a job.
        is_preemptible: Whether a job's runs may be preempted.
    """
    capacity = _Capacity(job, agents, limits_of(job), limits_of)
    for run in runs:
        capacity.hold(run)
    if capacity.fits():
        return []  # the stopping runs free enough
    lower = [run for run in runs if run.job.priority > job.priority and is_preemptible(run.job)]
    lower.sort(key=lambda run: (-run.job.priority, -run.run_id))
    chosen: list[Allocation] = []
    for run in filter(capacity.is_blocked_by, lower):
        chosen.append(run)
        capacity.hold(run, -1)
        if capacity.fits():
            break
    else:
        return None
    kept_running = {run.run_id for run in reversed(chosen) if _can_stay(run, capacity)}
    return [run.run_id for run in chosen if run.run_id not in kept_running]


def _can_stay(run: Allocation, capacity: _Capacity) -> bool:
    """Put a run back if the trial fits beside it; else leave it removed."""
    capacity.hold(run)
    if capacity.fits():
        return True
    capacity.hold(run, -1)
    return False
