"""Finding slots for one trial."""

from collections.abc import Mapping, Sequence

from zerolab.scheduler.types import AgentSlots

__all__ = ["Free", "kinds_in_order", "place"]

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

    Returns:
        Agent id to slot ids, or None when there is no room.
    """
    for kind in kinds_in_order(agents):
        room = {one.agent_id: free.get(one.agent_id, ()) for one in agents if one.kind == kind}
        chosen = _place(slots, room, single_agent=single_agent)
        if chosen is not None and (max_agents is None or len(chosen) <= max_agents):
            return chosen
    return None


def _place(slots: int, room: Free, *, single_agent: bool) -> dict[int, tuple[int, ...]] | None:
    fitting = [(len(ids), agent) for agent, ids in room.items() if len(ids) >= slots]
    if fitting:
        _, agent = min(fitting)
        return {agent: tuple(sorted(room[agent])[:slots])}
    if single_agent or sum(map(len, room.values())) < slots:
        return None
    chosen: dict[int, tuple[int, ...]] = {}
    missing = slots
    for agent in sorted(room, key=lambda agent: (-len(room[agent]), agent)):
        taken = sorted(room[agent])[:missing]
        if taken:
            chosen[agent] = tuple(taken)
            missing -= len(taken)
    return chosen
