"""Placement: choice of slots for one trial, and of those that later trials may take."""

from collections.abc import Iterable, Mapping, Sequence

from zerolab.scheduler.types import AgentSlots

__all__ = ["Free", "backfill_limit", "kinds_in_order", "place", "share"]

Free = Mapping[int, Sequence[int]]
"""Agent id to the ids of its free slots."""


def kinds_in_order(agents: Sequence[AgentSlots]) -> list[str]:
    """Return slot kinds in order of preference: GPUs before CPU slots."""
    return sorted({agent.kind for agent in agents}, key=lambda kind: (kind == "cpu", kind))


def place(
    slots: int,
    agents: Sequence[AgentSlots],
    free: Free,
    *,
    single_agent: bool = False,
    max_agents: int | None = None,
    unit: int = 1,
) -> dict[int, tuple[int, ...]] | None:
    """Choose slots on one agent if they fit, else on as few agents as possible.

    Of the agents that fit, the one with the fewest free slots is used, so that large gaps remain
    for large trials. GPUs come before CPU slots; ties go to the smaller agent id.

    Args:
        slots: Number of slots.
        agents: Agents on which the trial may run.
        free: Their free slots.
        single_agent: Whether all must be on one agent.
        max_agents: Maximum number of agents; unlimited when None.
        unit: Slots of one rank, which must be on one agent.

    Returns:
        Agent id to slot ids, or None when they do not fit.
    """
    for kind in kinds_in_order(agents):
        free_ids = {
            member.agent_id: free.get(member.agent_id, ())
            for member in agents
            if member.kind == kind
        }
        counts = {agent: len(ids) for agent, ids in free_ids.items()}
        limit = 1 if single_agent else max_agents
        shares = share(slots, counts, max_agents=limit, unit=unit)
        if shares is not None:
            return {
                agent: tuple(sorted(free_ids[agent])[:count]) for agent, count in shares.items()
            }
    return None


def share(
    slots: int, free: Mapping[int, int], *, max_agents: int | None = None, unit: int = 1
) -> dict[int, int] | None:
    """Choose how many slots of one kind each agent provides (see :func:`place`).

    Args:
        slots: Number of slots.
        free: Agent id to its number of free slots.
        max_agents: Maximum number of agents; unlimited when None.
        unit: Slots of one rank, which must be on one agent.

    Returns:
        Agent id to slots, the most first, or None when they do not fit.
    """
    fitting = [(count, agent) for agent, count in free.items() if count >= slots]
    if fitting:
        _, agent = min(fitting)
        return {agent: slots}
    if max_agents == 1:
        return None
    usable = {agent: count - count % unit for agent, count in free.items()}
    if sum(usable.values()) < slots:
        return None
    chosen: dict[int, int] = {}
    missing = slots
    for agent in sorted(usable, key=lambda agent: (-usable[agent], agent)):
        number = min(usable[agent], missing)
        if number:
            chosen[agent] = number
            missing -= number
    return chosen if max_agents is None or len(chosen) <= max_agents else None


def backfill_limit(free: int, holdings: Iterable[int], need: int, guaranteed: int = 0) -> int:
    """Return how many free units later jobs may use without delaying a waiting trial.

    A waiting trial that needs ``need`` units (slots of an agent, slots under a quota) starts as
    soon as the free units and the returned ones reach that number. The order in which runs end is
    unknown, so any sum of their holdings may be the decisive one. The smallest sufficient sum
    leaves the fewest units over. That surplus can be used by later jobs permanently: whatever the
    order of the ends, the waiting trial starts at the same moment.

    Args:
        free: Free units.
        holdings: Units of each run, returned all at once.
        need: Units that the waiting trial needs at once.
        guaranteed: Held units that are returned before it can start in any case, because it also
            waits for something else.

    Returns:
        At most ``free``; all of them if ``need`` can never be met here.
    """
    missing = need - free
    sums = 1  # bit n: a subset of the holdings sums to n units
    for units in holdings:
        sums |= sums << units
    minimum = max(missing, guaranteed, 0)
    sufficient = sums >> minimum
    if not sufficient:
        return free
    # The lowest set bit is the smallest sum that suffices.
    returned = minimum + (sufficient & -sufficient).bit_length() - 1
    return min(free, returned - missing)
