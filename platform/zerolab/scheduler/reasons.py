"""Why a trial waits, in the words that its user is shown wherever it stands."""

from collections.abc import Sequence

from zerolab.scheduler.placement import Free, place
from zerolab.scheduler.types import DEFAULT_POOL, HOST_SLOT, AgentSlots, Job, Request

__all__ = [
    "EARLIER",
    "behind",
    "full_quota",
    "never",
    "no_room",
    "over_quota",
    "own_quota",
    "quota_goes_first",
]


EARLIER = "an earlier trial of its experiment goes first"


def never(request: Request, agents: Sequence[AgentSlots]) -> str:
    """Say why a trial could not start even if every slot were free.

    Args:
        request: The trial.
        agents: All that are there, of every pool, closed ones too.
    """
    job = request.job
    pool = [agent for agent in agents if agent.pool == job.pool]
    if not pool:
        return _no_agent(job.pool, sorted({agent.pool for agent in agents}))
    allowed = [agent for agent in pool if agent.agent_id not in request.excluded]
    if not allowed:
        return "its log policies rule out every agent that is there"
    closed = _closed_that_fits(job, allowed)
    if closed is not None:
        return f"it needs {_slots(job)}, and agent {closed.name} {closed.closed}"
    rooms = [(agent.kind, len(agent.slots)) for agent in allowed if not agent.closed]
    most = _most(job, rooms)
    told = f"it needs {_slots(job)}, and there are at most {most or 'none'}{_off(allowed)}: "
    told += "it cannot start before an agent offers so many"
    return told + (f"; or set {job.slots_asked_by} to {most} or less" if most else "")


def no_room(request: Request, agents: Sequence[AgentSlots], free: Free, *, asked: bool) -> str:
    """Say what is missing for the trial whose turn it is.

    Args:
        request: The trial.
        agents: Those of its pool that take trials.
        free: Their free slots.
        asked: Whether other runs have been asked to make room.
    """
    there = [agent for agent in agents if agent.agent_id not in request.excluded]
    rooms = [(agent.kind, len(free.get(agent.agent_id, ()))) for agent in there]
    most = _most(request.job, rooms)
    told = f"it needs {_slots(request.job)}, of which {most or 'none'} {_is(most)} free"
    return told + ("; other runs are asked to make room" if asked else "")


def behind(request: Request, first: Request, *, fits: bool) -> str:
    """Say that ``first``, which does not fit either, goes before ``request``.

    Args:
        request: The trial that waits.
        first: The one before it.
        fits: Whether the slots for ``request`` are free.
    """
    if first.job.job_id == request.job.job_id:
        return EARLIER
    told = f"experiment {first.job.job_id} goes first"
    return f"{told}, and could have to wait longer if this one started now" if fits else told


def full_quota(job: Job, group: str, used: int, most: int) -> str:
    """Say that ``used`` of the ``most`` slots of a quota are held."""
    if group == own_quota(job):
        return f"its experiment holds {used} of the {most} slots of {job.bounded_by}"
    if group.startswith(HOST_SLOT):
        return f"{_host_slot(group)} of its hostfile is held by another trial"
    return f"it needs {_slots(job)}, and {used} of the {most} of quota {group} are held"


def over_quota(job: Job, group: str, most: int) -> str:
    """Say that a quota is smaller than what one trial needs."""
    if group == own_quota(job):
        return (
            f"it needs {_slots(job)}, and resources.max_slots is {most}: it cannot start before "
            f"that is raised: `zerolab job set max-slots {job.job_id} {job.slots}`"
        )
    return (
        f"it needs {_slots(job)}, and quota {group} allows {most}: it cannot start before that is "
        f"raised: `zerolab quota set {group} {job.slots}`"
    )


def quota_goes_first(group: str, first: Request) -> str:
    """Say that what is left of a quota is kept for ``first``."""
    what, are = f"slots of quota {group}", "are"
    if group.startswith(HOST_SLOT):
        what, are = _host_slot(group), "is"
    return f"experiment {first.job.job_id} goes first: {what} {are} kept for it"


def _host_slot(group: str) -> str:
    host, _, slot = group.removeprefix(HOST_SLOT).rpartition(":")
    return f"slot {slot} of {host}"


def own_quota(job: Job) -> str:
    """The name under which an experiment's own ``max_slots`` is counted."""
    return f"experiment:{job.job_id}"


def _no_agent(pool: str, others: Sequence[str]) -> str:
    if not others and pool == DEFAULT_POOL:
        return (
            "no agent is there to run it: start one with `zerolab up`, or with "
            "`zerolab agent start` on another machine"
        )
    told = f"no agent of pool {pool} is there: start one with `zerolab agent start --pool {pool}`"
    return told + (f"; agents are in {', '.join(others)}" if others else "")


def _closed_that_fits(job: Job, agents: Sequence[AgentSlots]) -> AgentSlots | None:
    """An agent that would hold the trial alone, if it took trials."""
    closed = [agent for agent in agents if agent.closed]
    free = {agent.agent_id: agent.slots for agent in closed}
    found = place(job.slots, closed, free, single_agent=True)
    return next((agent for agent in closed if found and agent.agent_id in found), None)


def _off(agents: Sequence[AgentSlots]) -> str:
    parts = [f"agent {one.name} {one.closed}" for one in agents if one.closed]
    parts += [
        f"{one.disabled} of agent {one.name} {_is(one.disabled)} disabled"
        for one in agents
        if one.disabled and not one.closed
    ]
    parts += [
        f"for {one.down} of agent {one.name} its cluster has no node now"
        for one in agents
        if one.down and not one.closed
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _slots(job: Job) -> str:
    what = "1 slot" if job.slots == 1 else f"{job.slots} slots"
    if job.slots > 1 and job.single_agent:
        return f"{what} on one machine"
    several = job.slots > 1 and job.max_agents is not None
    what = f"{what} on at most {job.max_agents} machines" if several else what
    return what if job.unit == 1 else f"{what}, those of a rank on one machine"


def _most(job: Job, rooms: Sequence[tuple[str, int]]) -> int:
    """The most slots of one kind for whole ranks, on as many machines as the trial may take."""
    most = 1 if job.single_agent else job.max_agents
    found = 0
    for wanted in {kind for kind, _ in rooms}:
        whole = (count // job.unit * job.unit for kind, count in rooms if kind == wanted)
        counts = sorted(whole, reverse=True)
        found = max(found, sum(counts[:most]))
    return found


def _is(count: int) -> str:
    return "are" if count > 1 else "is"
