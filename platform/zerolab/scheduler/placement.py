"""Finding slots for one trial."""

from collections.abc import Mapping, Sequence

from zerolab.scheduler.types import AgentSlots, Request

__all__ = ["Free", "place"]

Free = Mapping[int, Sequence[int]]
"""Agent id to the ids of its free slots."""


def place(
    request: Request, agents: Sequence[AgentSlots], free: Free
) -> dict[int, tuple[int, ...]] | None:
    """Choose slots: on one agent where they fit, else over as few agents as possible.

    Of the agents that fit, the one with the fewest free slots is taken, so that large gaps stay
    for large trials. GPUs come before CPU slots; equal choices go to the smaller agent id.

    Args:
        request: The trial.
        agents: All agents.
        free: Their free slots.

    Returns:
        Agent id to slot ids, or None when there is no room.
    """
    for kind in sorted({agent.kind for agent in agents}, key=lambda kind: (kind == "cpu", kind)):
        room = {
            agent.agent_id: sorted(free.get(agent.agent_id, ()))
            for agent in agents
            if agent.kind == kind and agent.agent_id not in request.excluded
        }
        chosen = _place(request, room)
        if chosen is not None:
            return chosen
    return None


def _place(request: Request, room: Mapping[int, list[int]]) -> dict[int, tuple[int, ...]] | None:
    fitting = [agent for agent in room if len(room[agent]) >= request.slots]
    if fitting:
        agent = min(fitting, key=lambda agent: (len(room[agent]), agent))
        return {agent: tuple(room[agent][: request.slots])}
    if request.single_agent or sum(map(len, room.values())) < request.slots:
        return None
    chosen: dict[int, tuple[int, ...]] = {}
    missing = request.slots
    for agent in sorted(room, key=lambda agent: (-len(room[agent]), agent)):
        taken = room[agent][:missing]
        if taken:
            chosen[agent] = tuple(taken)
            missing -= len(taken)
    return chosen
