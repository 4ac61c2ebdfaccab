"""Finding slots for one trial."""

from collections.abc import Mapping, Sequence

from zerolab.scheduler.types import AgentSlots

__all__ = ["Free", "kinds_in_order", "place", "share"]

Free = Mapping[int, Sequence[int]]
"""Agent id to the ids of its free slots."""


def kinds_in_order(agents: Sequence[AgentSlots]) -> list[str]:
    """Kinds of slots as they are given away: GPUs come before CPU slots."""
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
    """Choose slots: on one agent where they fit, else over as few agents as possible.

    Of the agents that fit, the one with the fewest free slots is taken, so that large gaps stay
    for large trials. GPUs come before CPU slots; equal choices go to the smaller agent id.

    Args:
        slots: How many.
        agents: Those on which the trial may run.
        free: Their free slots.
        single_agent: Whether all must be on one agent.
        max_agents: Most agents over which they may lie; any number when None.
        unit: Slots of one rank, which must lie on one agent.

    Returns:
        Agent id to slot ids, or None when there is no room.
    """
    for kind in kinds_in_order(agents):
        room = {one.agent_id: free.get(one.agent_id, ()) for one in agents if one.kind == kind}
        counts = {agent: len(ids) for agent, ids in room.items()}
        most = 1 if single_agent else max_agents
        shares = share(slots, counts, max_agents=most, unit=unit)
        if shares is not None:
            return {agent: tuple(sorted(room[agent])[:count]) for agent, count in shares.items()}
    return None


def share(
    slots: int, free: Mapping[int, int], *, max_agents: int | None = None, unit: int = 1
) -> dict[int, int] | None:
    """Choose how many slots of one kind each agent gives; see :func:`place`.

    Args:
        slots: How many are wanted.
        free: Agent id to how many are free there.
        max_agents: Most agents over which they may lie; any number when None.
        unit: Slots of one rank, which must lie on one agent.

    Returns:
        Agent id to slots, the most first, or None when there is no room.
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
        taken = min(usable[agent], missing)
        if taken:
            chosen[agent] = taken
            missing -= taken
    return chosen if max_agents is None or len(chosen) <= max_agents else None
