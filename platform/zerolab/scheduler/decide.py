"""Queue and free slots in, allocations and preemptions out.

The rules, in order:

1. A smaller priority number goes first.
2. At one priority, the experiment that holds the fewest slots for its weight goes first; between
   equals, the trial that was asked for first.
3. A trial gets all its slots at once or none.
4. A trial that does not fit preempts trials of lower priority, the newest first, if that makes
   room. Either way nothing behind it is started before it, so a large trial is never starved by
   small ones.
5. A trial that all agents together could not hold is set aside and blocks nobody.
6. Every trial that goes on waiting is told why.
"""

from collections.abc import Iterable, Mapping, Sequence

from zerolab.scheduler import reasons
from zerolab.scheduler.placement import place
from zerolab.scheduler.types import AgentSlots, Allocation, Decision, Request

__all__ = ["schedule"]


def schedule(
    agents: Sequence[AgentSlots], waiting: Iterable[Request], running: Sequence[Allocation]
) -> Decision:
    """Decide which waiting trials start, and which running ones must make room.

    Args:
        agents: Agents that are alive.
        waiting: Trials that want to run.
        running: What is held now, those that were asked to stop included.

    Returns:
        The decision, with the reason of each trial that goes on waiting. Nothing is to be done
        when nothing can change, so asking again costs nothing.
    """
    decision = Decision()
    everything = {agent.agent_id: agent.slots for agent in agents}
    queue: list[Request] = []
    for asked in sorted(waiting, key=lambda request: request.order):
        possible = place(asked, agents, everything) is not None
        if possible:
            queue.append(asked)
        else:
            decision.impossible.append(asked.trial_id)
            decision.waiting[asked.trial_id] = reasons.never(asked, agents)
    held = list(running)
    while (request := _next(queue, held)) is not None:
        free = _free(agents, held)
        slots = place(request, agents, free)
        if slots is None:
            decision.preempt.extend(_victims(request, agents, held))
            asked_to_leave = bool(decision.preempt) or any(each.stopping for each in held)
            told = reasons.no_room(request, agents, free, asked=asked_to_leave)
            decision.waiting[request.trial_id] = told
            break
        allocation = Allocation(request, slots)
        held.append(allocation)
        decision.start.append(allocation)
        queue.remove(request)
    decision.waiting.update(_behind(request, queue, held))
    return decision


def _next(queue: Sequence[Request], held: Sequence[Allocation]) -> Request | None:
    """The trial whose turn it is, leaving out experiments that may not hold more slots."""
    used = _used(held)

    def turn(request: Request) -> tuple[int, float, int]:
        share = used.get(request.experiment_id, 0) / request.weight
        return request.priority, share, request.order

    return min((each for each in queue if _may_grow(each, used)), key=turn, default=None)


def _behind(
    first: Request | None, queue: Sequence[Request], held: Sequence[Allocation]
) -> dict[int, str]:
    """Why those wait whose turn it is not: ``first`` goes before them, or they may not grow."""
    used = _used(held)
    told: dict[int, str] = {}
    for request in queue:
        if not _may_grow(request, used):
            held_slots = used.get(request.experiment_id, 0)
            told[request.trial_id] = reasons.full_experiment(held_slots, request)
        elif first is not None and request is not first:
            told[request.trial_id] = reasons.behind(request, first)
    return told


def _used(held: Iterable[Allocation]) -> dict[int, int]:
    """Experiment to the slots that it holds."""
    used: dict[int, int] = {}
    for allocation in held:
        experiment = allocation.request.experiment_id
        used[experiment] = used.get(experiment, 0) + allocation.request.slots
    return used


def _may_grow(request: Request, used: Mapping[int, int]) -> bool:
    mine = used.get(request.experiment_id, 0)
    return request.max_slots is None or mine + request.slots <= request.max_slots


def _free(agents: Sequence[AgentSlots], held: Iterable[Allocation]) -> dict[int, list[int]]:
    taken: dict[int, set[int]] = {}
    for allocation in held:
        for agent, slots in allocation.slots.items():
            taken.setdefault(agent, set()).update(slots)
    return {
        agent.agent_id: [s for s in agent.slots if s not in taken.get(agent.agent_id, ())]
        for agent in agents
    }


def _victims(
    request: Request, agents: Sequence[AgentSlots], held: Sequence[Allocation]
) -> list[int]:
    """The running trials to preempt so that ``request`` fits; none when that would not help."""
    staying = [allocation for allocation in held if not allocation.stopping]
    lower = [a for a in staying if a.request.priority > request.priority]
    lower.sort(key=lambda a: (-a.request.priority, -a.request.order))
    victims: list[Allocation] = []

    def fits_without(gone: Sequence[Allocation]) -> bool:
        rest = [allocation for allocation in staying if allocation not in gone]
        return place(request, agents, _free(agents, rest)) is not None

    if fits_without(()):
        return []  # what was asked to stop already makes room
    for allocation in lower:
        victims.append(allocation)
        if fits_without(victims):
            break
    else:
        return []
    for allocation in list(victims):
        spared = [victim for victim in victims if victim is not allocation]
        if fits_without(spared):
            victims = spared
    return [victim.request.trial_id for victim in victims]
