"""Ledger of one scheduling round: free slots, quota usage and reservations."""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from zerolab.scheduler import reasons
from zerolab.scheduler.placement import backfill_limit, place
from zerolab.scheduler.preemption import Limit, victims
from zerolab.scheduler.types import (
    HOST_SLOT,
    AgentSlots,
    Allocation,
    Cluster,
    Decision,
    Job,
    Policy,
    Request,
    Shape,
    Start,
)

__all__ = ["Ledger"]


class _BackfillArea(msgspec.Struct):
    """Agents of which jobs behind the first may take ``spare`` more slots."""

    agents: frozenset[int]
    spare: int


class _Pool(msgspec.Struct):
    """Agents of a pool that accept trials."""

    agents: list[AgentSlots] = msgspec.field(default_factory=list)
    free: dict[int, list[int]] = msgspec.field(default_factory=dict)
    largest: int = 0
    """Number of slots of its largest agent."""
    first: Request | None = None
    """First request in the queue that waits for slots."""
    areas: list[_BackfillArea] = msgspec.field(default_factory=list)
    """Limits for the requests behind it; an agent outside all areas is unlimited."""
    reasons_by_shape: dict[Shape, str] = msgspec.field(default_factory=dict)
    """Reasons of the requests behind it, by shape; cleared when slots are allocated."""

    is_blocked: bool = False
    """Whether no request behind the first may take any slot."""

    def is_ordinary(self, request: Request) -> bool:
        """Whether the request waits for slots behind another job's first request.

        Valid only for a trial that its job's own ``max_slots`` allows.
        """
        job = request.job
        large = job.slots > self.largest or bool(request.excluded)
        return not large and self.first is not None and job.job_id != self.first.job.job_id

    def update_blocked(self) -> None:
        """Update whether any request behind the first can start."""
        self.is_blocked = self.first is not None and not any(self.backfill_slots().values())

    def backfill_slots(self) -> dict[int, list[int]]:
        """Return the free slots that requests behind the first may take."""
        free = dict(self.free)
        for area in self.areas:
            for agent in area.agents & free.keys():
                free[agent] = free[agent][: area.spare]
        return free

    def take(self, slots: Mapping[int, tuple[int, ...]]) -> None:
        """Allocate slots."""
        self.reasons_by_shape.clear()
        for agent, ids in slots.items():
            self.free[agent] = [slot for slot in self.free[agent] if slot not in ids]
        for area in self.areas:
            area.spare -= sum(len(ids) for agent, ids in slots.items() if agent in area.agents)
        self.update_blocked()


class _QuotaReservation(msgspec.Struct):
    """Remainder of a quota for the requests behind the first that waits for it."""

    first: Request
    spare: int


class Ledger:
    """State of one scheduling round while slots are allocated.

    Args:
        cluster: Agents, policies, quotas.
        running: Allocations at the start of the round.
    """

    def __init__(self, cluster: Cluster, running: Sequence[Allocation]) -> None:
        self.decision = Decision()
        self._cluster = cluster
        self._allocations: list[Allocation] = []
        self.held_slots: dict[int, int] = {}
        """Number of slots that each job holds."""
        self._quota_reasons: dict[tuple[tuple[str, ...], int], tuple[str, int]] = {}
        """By groups and slots: the reason that a quota is reserved, and the job that it is
        reserved for. The spare part of a quota never grows in a round, so an entry stays valid."""
        self._used: Counter[str] = Counter()
        self._reserved: dict[str, _QuotaReservation] = {}
        self._limits: dict[tuple[str, ...], tuple[Limit, ...]] = {}
        self._stopping = {run.run_id for run in running if run.stopping}
        for run in running:
            self._add_allocation(run)
        used_slots: defaultdict[int, set[int]] = defaultdict(set)
        for run in running:
            for agent, slots in run.slots.items():
                used_slots[agent].update(slots)
        self._pools = self._make_pools(used_slots)

    def start(self, request: Request) -> Start | str:
        """Start one trial of a request, or return the reason why it waits.

        An elastic trial gets the largest of its slot numbers that is free. If none is, it waits for
        all its slots, or for the largest number that can ever exist.
        """
        job, pool = request.job, self._pools.get(request.job.pool)
        if not job.fewer or pool is None:
            return self._start(request)
        counts = (job.slots, *job.fewer)
        alternatives = [
            request._replace(job=replace(job, slots=slots, fewer=())) for slots in counts
        ]
        for alternative in alternatives:
            if self._can_start_now(alternative, pool):
                result = self._start(alternative)
                return result if isinstance(result, str) else result._replace(request=request)
        possible = (
            alternative for alternative in alternatives if self._is_possible(alternative, pool)
        )
        return self._start(next(possible, alternatives[0]))

    def _can_start_now(self, request: Request, pool: _Pool) -> bool:
        """Whether a trial would start now; changes nothing."""
        slots = request.job.slots
        for group, limit in self._limits_of(request.job):
            reserve = self._reserved.get(group)
            spare = limit if reserve is None else reserve.spare
            if self._used[group] + slots > limit or slots > spare:
                return False
        placement = _place(
            request, pool, pool.free if pool.first is None else pool.backfill_slots()
        )
        return placement is not None and (pool.first is None or _fits_backfill(pool, placement))

    def _start(self, request: Request) -> Start | str:
        job = request.job
        pool = self._pools.get(job.pool)
        limit = job.max_slots
        within_own_limit = limit is None or self.held_slots.get(job.job_id, 0) + job.slots <= limit
        if pool is not None and pool.is_blocked and within_own_limit and pool.is_ordinary(request):
            reason = pool.reasons_by_shape.get(job.shape)
            if reason is not None:
                return reason
        if pool is None or not self._is_possible(request, pool):
            self.decision.impossible.append(request.trial_id)
            return reasons.cannot_fit(request, self._cluster.agents)
        quota_reason = self._check_quotas(request, pool, within_own_limit=within_own_limit)
        if quota_reason is not None:
            return quota_reason
        if pool.first is not None:
            return self._backfill(request, pool, pool.first)
        slots = _place(request, pool, pool.free)
        return self._block_pool(request, pool) if slots is None else self._allocate(request, slots)

    def _backfill(self, request: Request, pool: _Pool, first: Request) -> Start | str:
        """Start a trial behind the waiting first one, if that cannot delay it."""
        shape = request.job.shape
        is_ordinary = not request.excluded and first.job.job_id != request.job.job_id
        if is_ordinary and shape in pool.reasons_by_shape:
            return pool.reasons_by_shape[shape]
        slots = _place(request, pool, pool.backfill_slots())
        if slots is not None and _fits_backfill(pool, slots):
            return self._allocate(request, slots)
        fits = _place(request, pool, pool.free) is not None
        reason = reasons.queued_behind(request, first, fits=fits)
        if is_ordinary:
            reason = sys.intern(reason)  # thousands are compared with the next round's
            pool.reasons_by_shape[shape] = reason
        return reason

    def _make_pools(self, used_slots: dict[int, set[int]]) -> dict[str, _Pool]:
        pools: dict[str, _Pool] = {}
        for agent in self._cluster.agents:
            if agent.closed:
                continue
            pool = pools.setdefault(agent.pool, _Pool())
            pool.agents.append(agent)
            used = used_slots.get(agent.agent_id, ())
            pool.free[agent.agent_id] = sorted(slot for slot in agent.slots if slot not in used)
            pool.largest = max(pool.largest, len(agent.slots))
        return pools

    def _add_allocation(self, run: Allocation) -> None:
        number = sum(map(len, run.slots.values()))
        self._allocations.append(run)
        self.held_slots[run.job.job_id] = self.held_slots.get(run.job.job_id, 0) + number
        for group, _ in self._limits_of(run.job):
            self._used[group] += number

    def _limits_of(self, job: Job) -> tuple[Limit, ...]:
        """Return the quotas that apply to a job."""
        shared = self._limits.get(job.groups)
        if shared is None:
            quotas = self._cluster.quotas
            shared = tuple(
                (group, 1 if group.startswith(HOST_SLOT) else quotas[group])
                for group in job.groups
                if group in quotas or group.startswith(HOST_SLOT)
            )
            self._limits[job.groups] = shared
        if job.max_slots is None:
            return shared
        return ((reasons.own_quota(job), job.max_slots), *shared)

    def _is_possible(self, request: Request, pool: _Pool) -> bool:
        if request.job.slots <= pool.largest and not request.excluded:
            return True
        everything = {agent.agent_id: agent.slots for agent in pool.agents}
        return _place(request, pool, everything) is not None

    # -- quotas ------------------------------------------------------------------------------

    def _check_quotas(self, request: Request, pool: _Pool, *, within_own_limit: bool) -> str | None:
        """Return the reason of the quota that prevents a trial from starting, if one does.

        Args:
            request: The trial.
            pool: Its pool.
            within_own_limit: Whether its job's own ``max_slots`` allows it.
        """
        job = request.job
        if within_own_limit:
            reason, first = self._quota_reasons.get((job.groups, job.slots), ("", job.job_id))
            if first != job.job_id:
                return reason
        for group, limit in self._limits_of(job):
            if job.slots > limit:
                self.decision.impossible.append(request.trial_id)
                return reasons.over_quota(job, group, limit)
            reserve = self._reserved.get(group)
            if reserve is not None and job.slots > reserve.spare:
                first = reserve.first.job.job_id
                if first != job.job_id:
                    reason = sys.intern(reasons.quota_reserved(group, reserve.first))
                    if group in job.groups:
                        self._quota_reasons[job.groups, job.slots] = reason, first
                    return reason
                full = self._used[group] + job.slots > limit
                reason = reasons.full_quota(job, group, self._used[group], limit)
                return reason if full else reasons.EARLIER_TRIAL
            if self._used[group] + job.slots > limit:
                if group in job.groups:  # else it waits for other trials of this job
                    self._reserve_quotas(request, group)
                    # Behind another waiting request nothing is preempted for it: that one would get
                    # the slots. After a preemption it starts, and needs slots too.
                    if pool.first is None and self._preempt_for(request, pool):
                        self._reserve_slots(request, pool)
                return reasons.full_quota(job, group, self._used[group], limit)
        return None

    def _reserve_quotas(self, request: Request, full_quota: str = "") -> None:
        """Reserve the quotas of a waiting trial: later ones get only what cannot delay it.

        Args:
            request: The trial.
            full_quota: Quota that it waits for; empty when it waits for slots.
        """
        limits = dict(self._limits_of(request.job))
        awaited = self._holders(full_quota) if full_quota else {}
        needed = request.job.slots
        guaranteed = 0
        if full_quota:
            # Before the trial can start, runs that count under the full quota must return at least
            # this many slots. A quota that counts all of these runs gets the same slots back, so
            # later jobs may use more of it.
            free = limits[full_quota] - self._used[full_quota]
            guaranteed = needed - free + backfill_limit(free, awaited.values(), needed)
        for group, limit in limits.items():
            if group not in self._reserved:
                holders = self._holders(group)
                returned = guaranteed if awaited.keys() <= holders.keys() else 0
                spare = backfill_limit(
                    limit - self._used[group], holders.values(), needed, returned
                )
                self._reserved[group] = _QuotaReservation(request, spare)

    def _holders(self, group: str) -> dict[int, int]:
        """Return the runs that a quota counts, by index, with their slots."""
        return {
            index: sum(map(len, run.slots.values()))
            for index, run in enumerate(self._allocations)
            if any(group == limit_group for limit_group, _ in self._limits_of(run.job))
        }

    # -- slots -------------------------------------------------------------------------------

    def _block_pool(self, request: Request, pool: _Pool) -> str:
        """Make a trial the first of its pool that waits for slots; return its reason."""
        self._reserve_slots(request, pool)
        self._reserve_quotas(request)
        usable = {
            (agent.agent_id, slot) for agent in _allowed(request, pool) for slot in agent.slots
        }
        is_preempting = self._preempt_for(request, pool) or any(
            (agent, slot) in usable
            for run in self._allocations
            if run.run_id in self._stopping
            for agent, slots in run.slots.items()
            for slot in slots
        )
        return reasons.no_free_slots(request, pool.agents, pool.free, is_preempting=is_preempting)

    def _reserve_slots(self, request: Request, pool: _Pool) -> None:
        """Limit the requests behind a trial to slots that it will not need."""
        pool.first = request
        pool.areas = self._backfill_areas(request, pool)
        pool.update_blocked()

    def _backfill_areas(self, request: Request, pool: _Pool) -> list[_BackfillArea]:
        """Return the backfill limits of a pool while a trial waits for slots there.

        An area is a set of agents that can hold the whole trial: one agent, or all agents of one
        kind. The trial starts in the first area where enough runs have ended, and nobody knows
        which that is. So each area has its own limit, and later jobs may use the surplus of each.
        Agents on which the trial may not run belong to no area: there nothing can delay it.
        """
        agents = _allowed(request, pool)
        usable = {agent.agent_id: frozenset(agent.slots) for agent in agents}
        if request.job.single_agent:
            area_of = {agent.agent_id: str(agent.agent_id) for agent in agents}
        else:
            area_of = {agent.agent_id: agent.kind for agent in agents}
        holdings: defaultdict[str, list[int]] = defaultdict(list)
        for run in self._allocations:
            # A run over several agents returns all its slots of an area at once.
            run_slots: Counter[str] = Counter()
            for agent in run.slots.keys() & usable.keys():
                run_slots[area_of[agent]] += len(usable[agent].intersection(run.slots[agent]))
            for area, number in run_slots.items():
                holdings[area].append(number)
        members: defaultdict[str, list[int]] = defaultdict(list)
        for agent, area in area_of.items():
            members[area].append(agent)
        return [
            _BackfillArea(
                frozenset(member_ids),
                backfill_limit(
                    sum(len(pool.free[agent_id]) for agent_id in member_ids),
                    holdings[area],
                    request.job.slots,
                ),
            )
            for area, member_ids in members.items()
        ]

    def _preempt_for(self, request: Request, pool: _Pool) -> bool:
        """Preempt runs for a trial; return whether it can start when they have stopped."""
        if not self._is_preemptible(request.job):
            return False
        staying = [run for run in self._allocations if run.run_id not in self._stopping]
        agents = _allowed(request, pool)
        run_ids = victims(request.job, agents, staying, self._limits_of, self._is_preemptible)
        if run_ids is None:
            return False
        self._stopping.update(run_ids)
        self.decision.preempt.extend(run_ids)
        return True

    def _is_preemptible(self, job: Job) -> bool:
        return self._cluster.policy(job.pool) != Policy.FIFO

    def _allocate(self, request: Request, slots: dict[int, tuple[int, ...]]) -> Start:
        job = request.job
        pool = self._pools[job.pool]
        pool.take(slots)
        for group, _ in self._limits_of(job):
            if group in self._reserved:
                self._reserved[group].spare -= job.slots
        self._add_allocation(Allocation(_STARTING, job, slots))
        return Start(request, slots, None if pool.first is None else pool.first.job.job_id)


_STARTING = 0
"""Run id of allocations made in this round; such runs are never preempted."""


def _allowed(request: Request, pool: _Pool) -> Sequence[AgentSlots]:
    if not request.excluded:
        return pool.agents
    return [agent for agent in pool.agents if agent.agent_id not in request.excluded]


def _place(
    request: Request, pool: _Pool, free: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]] | None:
    job = request.job
    return place(
        job.slots,
        _allowed(request, pool),
        free,
        single_agent=job.single_agent,
        max_agents=job.max_agents,
        unit=job.unit,
    )


def _fits_backfill(pool: _Pool, slots: dict[int, tuple[int, ...]]) -> bool:
    """Whether a placement over several agents leaves the reserved slots alone.

    ``backfill_slots()`` limits each agent to the surplus of its area. A placement over two agents
    of one area could take that surplus twice.
    """
    return all(
        sum(len(ids) for agent, ids in slots.items() if agent in area.agents) <= area.spare
        for area in pool.areas
    )
