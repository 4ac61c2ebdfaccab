"""Reasons why a trial waits, as shown to users."""

from collections.abc import Sequence

from zerolab.scheduler.placement import Free, place
from zerolab.scheduler.types import DEFAULT_POOL, HOST_SLOT, AgentSlots, Job, Request

__all__ = [
    "EARLIER_TRIAL",
    "cannot_fit",
    "full_quota",
    "no_free_slots",
    "over_quota",
    "own_quota",
    "queued_behind",
    "quota_reserved",
]


EARLIER_TRIAL = "an earlier trial of its experiment goes first"


def cannot_fit(request: Request, agents: Sequence[AgentSlots]) -> str:
    """Return why a trial could not start even if every slot were free.

    Args:
        request: The trial.
        agents: All agents of every pool, including closed ones.
    """
    job = request.job
    pool = [agent for agent in agents if agent.pool == job.pool]
    if not pool:
        return _no_agent(job.pool, sorted({agent.pool for agent in agents}))
    allowed = [agent for agent in pool if agent.agent_id not in request.excluded]
    if not allowed:
        return "its log policies exclude every agent"
    closed = _closed_agent_that_fits(job, allowed)
    if closed is not None:
        return f"it needs {_describe_slots(job)}, and agent {closed.name} {closed.closed}"
    capacities = [(agent.kind, len(agent.slots)) for agent in allowed if not agent.closed]
    limit = _max_slots(job, capacities)
    reason = (
        f"it needs {_describe_slots(job)}, and there are at most {limit or 'none'}"
        f"{_unusable_slots(allowed)} so far: it starts when agents with enough slots connect"
    )
    remedy = f"; or set {job.slots_key} to {limit} or less" if limit else ""
    if job.single_agent and limit and job.slots_key.startswith("resources."):
        remedy += ", or resources.max_nodes to the number of machines"
    return reason + remedy


def no_free_slots(
    request: Request, agents: Sequence[AgentSlots], free: Free, *, is_preempting: bool
) -> str:
    """Return which slots the first trial of the queue lacks.

    Args:
        request: The trial.
        agents: Agents of its pool that accept trials.
        free: Their free slots.
        is_preempting: Whether runs with slots that it can use are ending.
    """
    usable = [agent for agent in agents if agent.agent_id not in request.excluded]
    capacities = [(agent.kind, len(free.get(agent.agent_id, ()))) for agent in usable]
    limit = _max_slots(request.job, capacities)
    needed = _describe_slots(request.job)
    reason = f"it needs {needed}, of which {limit or 'none'} {_be_form(limit)} free"
    return reason + ("; other runs save a checkpoint and free their slots" if is_preempting else "")


def queued_behind(request: Request, first: Request, *, fits: bool) -> str:
    """Return the reason that ``first``, which does not fit either, is before ``request``.

    Args:
        request: The trial that waits.
        first: The trial before it.
        fits: Whether the slots for ``request`` are free.
    """
    if first.job.job_id == request.job.job_id:
        return EARLIER_TRIAL
    reason = f"experiment {first.job.job_id} goes first"
    return f"{reason}, and could wait longer if this job started now" if fits else reason


def full_quota(job: Job, group: str, used: int, limit: int) -> str:
    """Return the reason that ``used`` of the ``limit`` slots of a quota are held."""
    if group == own_quota(job):
        return f"its experiment holds {used} of the {limit} slots of {job.max_slots_key}"
    if group.startswith(HOST_SLOT):
        return f"{_host_slot(group)} of its hostfile is held by another trial"
    return f"it needs {_describe_slots(job)}, and {used} of the {limit} of quota {group} are held"


def over_quota(job: Job, group: str, limit: int) -> str:
    """Return the reason that a quota is smaller than one trial."""
    if group == own_quota(job):
        return (
            f"it needs {_describe_slots(job)}, and resources.max_slots is {limit}: it cannot start "
            f"until that is raised: `zerolab job set max-slots {job.job_id} {job.slots}`"
        )
    request = f"`zerolab quota request {job.slots}`, or " if group.startswith("user:") else ""
    return (
        f"it needs {_describe_slots(job)}, and quota {group} allows {limit}: it cannot start until "
        f"that is raised: {request}`zerolab quota set {group} {job.slots}`"
    )


def quota_reserved(group: str, first: Request) -> str:
    """Return the reason that the remainder of a quota is reserved for ``first``."""
    resource, verb = f"slots of quota {group}", "are"
    if group.startswith(HOST_SLOT):
        resource, verb = _host_slot(group), "is"
    return f"experiment {first.job.job_id} goes first: {resource} {verb} reserved for it"


def _host_slot(group: str) -> str:
    host, _, slot = group.removeprefix(HOST_SLOT).rpartition(":")
    return f"slot {slot} of {host}"


def own_quota(job: Job) -> str:
    """Return the group name of an experiment's own ``max_slots``."""
    return f"experiment:{job.job_id}"


def _no_agent(pool: str, other_pools: Sequence[str]) -> str:
    if not other_pools and pool == DEFAULT_POOL:
        return (
            "no agent is connected yet: start one with `zerolab up`, or with "
            "`zerolab agent start` on another machine"
        )
    reason = (
        f"no agent of pool {pool} is connected: start one with `zerolab agent start --pool {pool}`"
    )
    return reason + (f"; agents are in {', '.join(other_pools)}" if other_pools else "")


def _closed_agent_that_fits(job: Job, agents: Sequence[AgentSlots]) -> AgentSlots | None:
    """Return a closed agent that could hold the trial alone."""
    closed = [agent for agent in agents if agent.closed]
    free = {agent.agent_id: agent.slots for agent in closed}
    placement = place(job.slots, closed, free, single_agent=True)
    return next((agent for agent in closed if placement and agent.agent_id in placement), None)


def _unusable_slots(agents: Sequence[AgentSlots]) -> str:
    parts = [f"agent {agent.name} {agent.closed}" for agent in agents if agent.closed]
    parts += [
        f"{agent.disabled} of agent {agent.name} {_be_form(agent.disabled)} disabled"
        for agent in agents
        if agent.disabled and not agent.closed
    ]
    parts += [
        f"for {agent.down} of agent {agent.name} its cluster has no node now"
        for agent in agents
        if agent.down and not agent.closed
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _describe_slots(job: Job) -> str:
    text = "1 slot" if job.slots == 1 else f"{job.slots} slots"
    if job.slots > 1 and job.single_agent:
        return f"{text} on one machine"
    several = job.slots > 1 and job.max_agents is not None
    text = f"{text} on at most {job.max_agents} machines" if several else text
    return text if job.unit == 1 else f"{text}, those of a rank on one machine"


def _max_slots(job: Job, capacities: Sequence[tuple[str, int]]) -> int:
    """Return the most slots of one kind, in whole ranks, on the machines that a trial may use."""
    limit = 1 if job.single_agent else job.max_agents
    best = 0
    for slot_kind in {kind for kind, _ in capacities}:
        rounded = (count // job.unit * job.unit for kind, count in capacities if kind == slot_kind)
        counts = sorted(rounded, reverse=True)
        best = max(best, sum(counts[:limit]))
    return best


def _be_form(count: int) -> str:
    return "are" if count > 1 else "is"
