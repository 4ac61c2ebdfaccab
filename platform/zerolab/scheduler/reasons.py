"""Why a trial waits, in the words that its user is shown wherever it stands."""

from collections.abc import Sequence

from zerolab.scheduler.placement import Free
from zerolab.scheduler.types import AgentSlots, Request

__all__ = ["behind", "full_experiment", "never", "no_room"]


def never(request: Request, agents: Sequence[AgentSlots]) -> str:
    """Say why a trial could not start even if every slot were free."""
    if not agents:
        return (
            "no agent is there to run it: start one with `zerolab up`, or with "
            "`zerolab agent start` on another machine"
        )
    allowed = [agent for agent in agents if agent.agent_id not in request.excluded]
    if not allowed:
        return "its log policies rule out every agent that is there"
    most = _most(request, [(agent.kind, len(agent.slots)) for agent in allowed])
    return (
        f"it needs {_slots(request)}, and there are at most {most}: it cannot start before an "
        f"agent offers so many; or set resources.slots_per_trial to {most} or less"
    )


def no_room(request: Request, agents: Sequence[AgentSlots], free: Free, *, asked: bool) -> str:
    """Say what is missing for the trial whose turn it is.

    Args:
        request: The trial.
        agents: All agents.
        free: Their free slots.
        asked: Whether other runs have been asked to make room.
    """
    there = [agent for agent in agents if agent.agent_id not in request.excluded]
    most = _most(request, [(agent.kind, len(free.get(agent.agent_id, ()))) for agent in there])
    told = f"it needs {_slots(request)}, of which {most or 'none'} {_is(most)} free"
    return told + ("; other runs are asked to make room" if asked else "")


def behind(request: Request, first: Request) -> str:
    """Say that ``first``, which does not fit either, goes before ``request``."""
    if first.experiment_id == request.experiment_id:
        return "an earlier trial of its experiment goes first"
    return f"experiment {first.experiment_id} goes first"


def full_experiment(held: int, request: Request) -> str:
    """Say that an experiment, which holds ``held`` slots, may not hold more."""
    return f"its experiment holds {held} of the {request.max_slots} slots of resources.max_slots"


def _slots(request: Request) -> str:
    what = "1 slot" if request.slots == 1 else f"{request.slots} slots"
    return f"{what} on one machine" if request.single_agent and request.slots > 1 else what


def _most(request: Request, rooms: Sequence[tuple[str, int]]) -> int:
    """The most slots of one kind: on one machine where they must be there, else together."""
    if request.single_agent:
        return max((count for _, count in rooms), default=0)
    kinds = {kind for kind, _ in rooms}
    return max((sum(n for each, n in rooms if each == kind) for kind in kinds), default=0)


def _is(count: int) -> str:
    return "are" if count > 1 else "is"
