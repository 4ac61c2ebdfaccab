"""The accounts of one round: what is free, what each quota allows, and who waits for what."""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zerolab.scheduler import reasons
from zerolab.scheduler.backfill import lendable
from zerolab.scheduler.placement import place
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


@dataclass
class _Room:
    """Agents of which those behind the first may take ``lent`` more slots."""

    agents: frozenset[int]
    lent: int


@dataclass
class _Pool:
    """The agents of a pool that take trials."""

    agents: list[AgentSlots] = field(default_factory=list)
    free: dict[int, list[int]] = field(default_factory=dict)
    largest: int = 0
    """Slots of its largest agent."""
    first: Request | None = None
    """The one that waits for slots and is before all others."""
    rooms: list[_Room] = field(default_factory=list)
    """What those behind it may take; all of an agent that stands in none."""
    refused: dict[Shape, str] = field(default_factory=dict)
    """What was said to those behind it, by what they asked for; until something is taken."""

    shut: bool = False
    """Whether nobody behind the first one may take any slot."""

    def is_ordinary(self, request: Request) -> bool:
        """Whether it waits for slots like any other, behind the first one, which is another job's.

        Only of a trial that its job's own ``max_slots`` does not keep from starting.
        """
        job = request.job
        large = job.slots > self.largest or bool(request.excluded)
        return not large and self.first is not None and job.job_id != self.first.job.job_id

    def look_over(self) -> None:
        """Note whether anybody behind the first one can start."""
        self.shut = self.first is not None and not any(self.lent().values())

    def lent(self) -> dict[int, list[int]]:
        """Free slots that those behind the first one may take."""
        free = dict(self.free)
        for room in self.rooms:
            for agent in room.agents & free.keys():
                free[agent] = free[agent][: room.lent]
        return free

    def take(self, slots: Mapping[int, tuple[int, ...]]) -> None:
        """Give slots away."""
        self.refused.clear()
        for agent, ids in slots.items():
            self.free[agent] = [slot for slot in self.free[agent] if slot not in ids]
        for room in self.rooms:
            room.lent -= sum(len(ids) for agent, ids in slots.items() if agent in room.agents)
        self.look_over()


@dataclass
class _Reserve:
    """What is left of a quota for those behind the first that waits for it."""

    first: Request
    lent: int


class Ledger:
    """What there is in one round, while it is given away.

    Args:
        cluster: Agents, policies, quotas.
        running: What is held when the round begins.
    """

    def __init__(self, cluster: Cluster, running: Sequence[Allocation]) -> None:
        self.decision = Decision()
        self._cluster = cluster
        self._held: list[Allocation] = []
        self.held: dict[int, int] = {}
        """Job to the slots that it holds."""
        self._overtaken: dict[tuple[tuple[str, ...], int], tuple[str, int]] = {}
        """By groups and slots: that a quota is kept for another job, and for which. What is lent of
        a quota never grows in a round, so this stays true."""
        self._used: Counter[str] = Counter()
        self._reserved: dict[str, _Reserve] = {}
        self._limits: dict[tuple[str, ...], tuple[Limit, ...]] = {}
        self._leaving = {run.run_id for run in running if run.stopping}
        for run in running:
            self._hold(run)
        taken: defaultdict[int, set[int]] = defaultdict(set)
        for run in running:
            for agent, slots in run.slots.items():
                taken[agent].update(slots)
        self._pools = self._make_pools(taken)

    def start(self, request: Request) -> Start | str:
        """Start one trial of a request, or say why it waits.

        One that may have fewer slots gets the most that are free; where none fit, it waits for all
        of them, or for the most that there will ever be.
        """
        job, pool = request.job, self._pools.get(request.job.pool)
        if not job.fewer or pool is None:
            return self._start(request)
        counts = (job.slots, *job.fewer)
        wishes = [request._replace(job=replace(job, slots=slots, fewer=())) for slots in counts]
        for wish in wishes:
            if self._has_room(wish, pool):
                found = self._start(wish)
                return found if isinstance(found, str) else found._replace(request=request)
        possible = (wish for wish in wishes if self._is_possible(wish, pool))
        return self._start(next(possible, wishes[0]))

    def _has_room(self, request: Request, pool: _Pool) -> bool:
        """Whether a trial would start now; nothing is changed by asking."""
        slots = request.job.slots
        for group, most in self._limits_of(request.job):
            reserve = self._reserved.get(group)
            lent = most if reserve is None else reserve.lent
            if self._used[group] + slots > most or slots > lent:
                return False
        found = _place(request, pool, pool.free if pool.first is None else pool.lent())
        return found is not None and (pool.first is None or _is_lent(pool, found))

    def _start(self, request: Request) -> Start | str:
        job = request.job
        pool = self._pools.get(job.pool)
        most = job.max_slots
        own = most is None or self.held.get(job.job_id, 0) + job.slots <= most
        if pool is not None and pool.shut and own and pool.is_ordinary(request):
            told = pool.refused.get(job.shape)
            if told is not None:
                return told
        if pool is None or not self._is_possible(request, pool):
            self.decision.impossible.append(request.trial_id)
            return reasons.never(request, self._cluster.agents)
        refused = self._check_quotas(request, pool, own=own)
        if refused is not None:
            return refused
        if pool.first is not None:
            return self._start_behind(request, pool, pool.first)
        slots = _place(request, pool, pool.free)
        return self._wait_first(request, pool) if slots is None else self._take(request, slots)

    def _start_behind(self, request: Request, pool: _Pool, first: Request) -> Start | str:
        """Start a trial where that cannot delay the first one, which waits."""
        asked = request.job.shape
        alike = not request.excluded and first.job.job_id != request.job.job_id
        if alike and asked in pool.refused:
            return pool.refused[asked]
        slots = _place(request, pool, pool.lent())
        if slots is not None and _is_lent(pool, slots):
            return self._take(request, slots)
        fits = _place(request, pool, pool.free) is not None
        told = reasons.behind(request, first, fits=fits)
        if alike:
            told = sys.intern(told)  # ten thousand are compared with those of the next round
            pool.refused[asked] = told
        return told

    def _make_pools(self, taken: dict[int, set[int]]) -> dict[str, _Pool]:
        pools: dict[str, _Pool] = {}
        for agent in self._cluster.agents:
            if agent.closed:
                continue
            pool = pools.setdefault(agent.pool, _Pool())
            pool.agents.append(agent)
            used = taken.get(agent.agent_id, ())
            pool.free[agent.agent_id] = sorted(slot for slot in agent.slots if slot not in used)
            pool.largest = max(pool.largest, len(agent.slots))
        return pools

    def _hold(self, run: Allocation) -> None:
        number = sum(map(len, run.slots.values()))
        self._held.append(run)
        self.held[run.job.job_id] = self.held.get(run.job.job_id, 0) + number
        for group, _ in self._limits_of(run.job):
            self._used[group] += number

    def _limits_of(self, job: Job) -> tuple[Limit, ...]:
        """The quotas that count for a job."""
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

    def _check_quotas(self, request: Request, pool: _Pool, *, own: bool) -> str | None:
        """Say which quota keeps a trial from starting, if one does.

        Args:
            request: The trial.
            pool: Its pool.
            own: Whether its job's own ``max_slots`` allows it.
        """
        job = request.job
        if own:
            told, first = self._overtaken.get((job.groups, job.slots), ("", job.job_id))
            if first != job.job_id:
                return told
        for group, most in self._limits_of(job):
            if job.slots > most:
                self.decision.impossible.append(request.trial_id)
                return reasons.over_quota(job, group, most)
            reserve = self._reserved.get(group)
            if reserve is not None and job.slots > reserve.lent:
                first = reserve.first.job.job_id
                if first != job.job_id:
                    told = sys.intern(reasons.quota_goes_first(group, reserve.first))
                    if group in job.groups:
                        self._overtaken[job.groups, job.slots] = told, first
                    return told
                full = self._used[group] + job.slots > most
                told = reasons.full_quota(job, group, self._used[group], most)
                return told if full else reasons.EARLIER
            if self._used[group] + job.slots > most:
                if group in job.groups:  # else it waits for trials of its own
                    self._reserve(request, group)
                    # Behind another one that waits here, nobody is asked to leave for it: that one
                    # would get the slots. When some do leave it starts, and needs slots too.
                    if pool.first is None and self._preempt_for(request, pool):
                        self._keep_slots(request, pool)
                return reasons.full_quota(job, group, self._used[group], most)
        return None

    def _reserve(self, request: Request, full: str = "") -> None:
        """Keep what a trial waits for: those behind it get only what cannot delay it.

        Args:
            request: The trial.
            full: The quota that it waits for; empty where it waits for slots.
        """
        limits = dict(self._limits_of(request.job))
        waits_for = self._holders(full) if full else {}
        needed = request.job.slots
        surely = 0
        if full:
            free = limits[full] - self._used[full]
            surely = needed - free + lendable(free, waits_for.values(), needed)
        for group, most in limits.items():
            if group not in self._reserved:
                held = self._holders(group)
                given = surely if waits_for.keys() <= held.keys() else 0
                lent = lendable(most - self._used[group], held.values(), needed, given)
                self._reserved[group] = _Reserve(request, lent)

    def _holders(self, group: str) -> dict[int, int]:
        """Place in our list of each run that a quota counts, and its slots."""
        return {
            index: sum(map(len, run.slots.values()))
            for index, run in enumerate(self._held)
            if any(group == each for each, _ in self._limits_of(run.job))
        }

    # -- slots -------------------------------------------------------------------------------

    def _wait_first(self, request: Request, pool: _Pool) -> str:
        """Have a trial wait for slots, before all others of its pool."""
        self._keep_slots(request, pool)
        self._reserve(request)
        usable = {
            (agent.agent_id, slot) for agent in _allowed(request, pool) for slot in agent.slots
        }
        asked = self._preempt_for(request, pool) or any(
            (agent, slot) in usable
            for run in self._held
            if run.run_id in self._leaving
            for agent, slots in run.slots.items()
            for slot in slots
        )
        return reasons.no_room(request, pool.agents, pool.free, asked=asked)

    def _keep_slots(self, request: Request, pool: _Pool) -> None:
        """Lend to those behind a trial only slots that it will not need."""
        pool.first = request
        pool.rooms = self._rooms(request, pool)
        pool.look_over()

    def _rooms(self, request: Request, pool: _Pool) -> list[_Room]:
        """What of a pool may be lent while a trial waits for slots there."""
        agents = _allowed(request, pool)
        usable = {agent.agent_id: frozenset(agent.slots) for agent in agents}
        if request.job.single_agent:
            room_of = {agent.agent_id: str(agent.agent_id) for agent in agents}
        else:
            room_of = {agent.agent_id: agent.kind for agent in agents}
        held: defaultdict[str, list[int]] = defaultdict(list)
        for run in self._held:
            mine: Counter[str] = Counter()
            for agent in run.slots.keys() & usable.keys():
                mine[room_of[agent]] += len(usable[agent].intersection(run.slots[agent]))
            for room, number in mine.items():
                held[room].append(number)
        members: defaultdict[str, list[int]] = defaultdict(list)
        for agent, room in room_of.items():
            members[room].append(agent)
        return [
            _Room(
                frozenset(those),
                lendable(sum(len(pool.free[one]) for one in those), held[room], request.job.slots),
            )
            for room, those in members.items()
        ]

    def _preempt_for(self, request: Request, pool: _Pool) -> bool:
        """Ask runs to leave for a trial; return whether it can start when they have left."""
        if not self._may_be_asked(request.job):
            return False
        staying = [run for run in self._held if run.run_id not in self._leaving]
        agents = _allowed(request, pool)
        found = victims(request.job, agents, staying, self._limits_of, self._may_be_asked)
        if found is None:
            return False
        self._leaving.update(found)
        self.decision.preempt.extend(found)
        return True

    def _may_be_asked(self, job: Job) -> bool:
        return self._cluster.policy(job.pool) != Policy.FIFO

    def _take(self, request: Request, slots: dict[int, tuple[int, ...]]) -> Start:
        job = request.job
        pool = self._pools[job.pool]
        pool.take(slots)
        for group, _ in self._limits_of(job):
            if group in self._reserved:
                self._reserved[group].lent -= job.slots
        self._hold(Allocation(_STARTING, job, slots))
        return Start(request, slots, None if pool.first is None else pool.first.job.job_id)


_STARTING = 0
"""Run id of what starts in this round: such a run is asked to leave by nobody."""


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


def _is_lent(pool: _Pool, slots: dict[int, tuple[int, ...]]) -> bool:
    """Whether a placement over several agents leaves alone what is kept for the first."""
    return all(
        sum(len(ids) for agent, ids in slots.items() if agent in room.agents) <= room.lent
        for room in pool.rooms
    )
