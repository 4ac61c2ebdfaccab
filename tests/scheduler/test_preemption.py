"""Preemption against an exhaustive search over all sets of runs, for a single waiting trial.

The rounds of ``test_model.py`` rarely preempt in a way that would reveal a mistake.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from msgspec.structs import replace

from zerolab.scheduler import (
    AgentSlots,
    Allocation,
    Cluster,
    Decision,
    Job,
    Policy,
    Request,
    schedule,
)

LABELS = ("label:x", "label:y")
POLICIES = (Policy.FAIR_SHARE, Policy.FAIR_SHARE, Policy.PRIORITY, Policy.FIFO)

# -- one trial that waits --------------------------------------------------------------------


def some_cluster(rng: Random) -> Cluster:
    agents = [
        AgentSlots(
            number,
            tuple(range(rng.randint(1, 5))),
            kind=rng.choice(["cpu", "cpu", "cpu", "cuda"]),
            pool=rng.choice(["default", "default", "default", "other"]),
            closed=rng.choice([""] * 7 + ["is disabled"]),
        )
        for number in range(1, rng.randint(1, 3) + 1)
    ]
    quotas = {label: rng.randint(1, 5) for label in rng.sample(LABELS, rng.randint(0, 2))}
    policies = {pool: rng.choice(POLICIES) for pool in ("default", "other")}
    return Cluster(agents, policies, quotas)


def some_labels(rng: Random) -> tuple[str, ...]:
    return tuple(rng.sample(LABELS, rng.choice([0, 0, 1, 2])))


def some_request(rng: Random) -> Request:
    unit, single = rng.choice([1, 1, 2]), rng.random() < 0.5
    job = Job(
        job_id=1,
        slots=unit * rng.randint(1, 3),
        position=1.0,
        priority=rng.choice([1, 42, 50]),
        max_slots=rng.choice([None, None, None, 4]),
        groups=some_labels(rng),
        single_agent=single,
        max_agents=None if single else rng.choice([None, 1, 2]),
        unit=unit,
    )
    return Request(100, job, 1, frozenset(rng.choice([(), (), (), (1,)])))


def some_runs(rng: Random, cluster: Cluster, waiting_job: Job) -> list[Allocation]:
    """Return runs on slots of one pool each, some disabled since; most slots are held."""
    free = {member.agent_id: [*member.slots, len(member.slots)] for member in cluster.agents}
    allocations = []
    for run_id in rng.sample(range(1, 8), rng.randint(1, 7)):
        pool = rng.choice(cluster.agents).pool
        slots: dict[int, tuple[int, ...]] = {}
        for agent in cluster.agents:
            if agent.pool == pool and rng.random() < 0.6 and free[agent.agent_id]:
                free_ids = free[agent.agent_id]
                slots[agent.agent_id] = tuple(
                    free_ids.pop(0) for _ in free_ids[: rng.randint(1, 2)]
                )
        if not slots:
            continue
        number = sum(map(len, slots.values()))
        other = Job(
            job_id=run_id + 10,
            slots=number,
            position=0.0,
            pool=pool,
            priority=rng.choice([10, 42, 90, 90, 95, 99]),
            groups=some_labels(rng),
        )
        is_same_job = pool == waiting_job.pool and rng.random() < 0.1
        job = replace(waiting_job, slots=number) if is_same_job else other
        allocations.append(Allocation(run_id, job, slots, stopping=rng.random() < 0.2))
    return allocations


def has_quota(
    cluster: Cluster, job: Job, allocations: Sequence[Allocation], *, own_limit: bool
) -> bool:
    """Return true if quotas and ``max_slots`` suffice in addition to these runs."""
    if own_limit:
        job_slots = sum(run.job.slots for run in allocations if run.job.job_id == job.job_id)
        return job.max_slots is None or job_slots + job.slots <= job.max_slots
    return all(
        sum(run.job.slots for run in allocations if group in run.job.groups) + job.slots
        <= cluster.quotas.get(group, 99)
        for group in job.groups
    )


def has_slots(cluster: Cluster, request: Request, allocations: Sequence[Allocation]) -> bool:
    """Whether agents of one kind, within the limit, have the free slots."""
    job = request.job
    free: defaultdict[str, list[int]] = defaultdict(list)
    for agent in cluster.agents:
        if agent.pool == job.pool and not agent.closed and agent.agent_id not in request.excluded:
            used_slots = {slot for run in allocations for slot in run.slots.get(agent.agent_id, ())}
            free[agent.kind].append(len(set(agent.slots) - used_slots))
    most = 1 if job.single_agent else job.max_agents or 9
    return any(
        sum(count // job.unit * job.unit for count in some) >= job.slots
        for counts in free.values()
        for number in range(1, most + 1)
        for some in itertools.combinations(counts, number)
    )


def expected_victims(
    cluster: Cluster, request: Request, allocations: Sequence[Allocation]
) -> set[int]:
    """Return the preempted runs by trying every set, sparing the most important runs first."""

    def starts(allocations: Sequence[Allocation]) -> bool:
        slots = has_slots(cluster, request, allocations)
        return slots and has_quota(cluster, request.job, allocations, own_limit=False)

    stay = [run for run in allocations if not run.stopping]
    if not has_quota(cluster, request.job, allocations, own_limit=True) or starts(stay):
        return set()
    if cluster.policy(request.job.pool) == Policy.FIFO:
        return set()
    most_important_first = sorted(
        (
            run
            for run in stay
            if run.job.priority > request.job.priority
            and cluster.policy(run.job.pool) != Policy.FIFO
        ),
        key=lambda run: (run.job.priority, run.run_id),
    )
    # In this order the first sufficient set spares the most important runs.
    for leave in itertools.product([False, True], repeat=len(most_important_first)):
        leaving = {
            run.run_id for run, leaves in zip(most_important_first, leave, strict=True) if leaves
        }
        if starts([run for run in stay if run.run_id not in leaving]):
            return leaving
    return set()


def check(cluster: Cluster, request: Request, allocations: Sequence[Allocation]) -> Decision:
    decision = schedule(cluster, [request], allocations)
    assert set(decision.preempt) == expected_victims(cluster, request, allocations)
    assert len(set(decision.preempt)) == len(decision.preempt)
    stopping = [run.run_id in decision.preempt or run.stopping for run in allocations]
    reason = decision.waiting.get(100, "")
    if "of which" in reason:
        usable = {
            (agent.agent_id, slot)
            for agent in cluster.agents
            if agent.pool == request.job.pool and not agent.closed
            for slot in agent.slots
            if agent.agent_id not in request.excluded
        }
        is_stopping = any(
            stops
            and any((number, slot) in usable for number, ids in run.slots.items() for slot in ids)
            for run, stops in zip(allocations, stopping, strict=True)
        )
        assert ("other runs save a checkpoint and free their slots" in reason) == (
            is_stopping or bool(decision.preempt)
        )
    leaving = [
        replace(run, stopping=stops) for run, stops in zip(allocations, stopping, strict=True)
    ]
    if not decision.start:
        assert schedule(cluster, [request], leaving) == Decision(
            decision.start, [], decision.impossible
        )
    if decision.preempt:
        assert schedule(cluster, [request], [run for run in leaving if not run.stopping]).start
    return decision


def test_preemption_matches_exhaustive_search() -> None:
    preempted: Counter[int] = Counter()
    for seed in range(8000):
        rng = Random(seed)
        cluster, request = some_cluster(rng), some_request(rng)
        allocations = some_runs(rng, cluster, request.job)
        try:
            preempted[len(check(cluster, request, allocations).preempt)] += 1
        except AssertionError as error:
            raise AssertionError(f"{cluster}\n{request}\n{allocations}") from error
    assert preempted[1] > 500
    assert preempted[2] + preempted[3] > 100


# -- several waiting trials  -----------------------------------------------------------------------

X = {"groups": ("label:x",)}


def job(job_id: int, slots: int = 1, **more: Any) -> Job:
    return Job(
        job_id=job_id, slots=slots, **{"position": float(job_id), "single_agent": True, **more}
    )


def request(job_id: int, slots: int = 1, **more: Any) -> Request:
    return Request(100 * job_id, job(job_id, slots, **more))


def run(run_id: int, agent: int, *slots: int, stopping: bool = False, **more: Any) -> Allocation:
    run_job = job(1000 + run_id, len(slots), **more)
    return Allocation(run_id, run_job, {agent: slots}, stopping)


def cluster(*slots: int, **quotas: int) -> Cluster:
    """Return agents of the pool ``default`` with these slot counts, and quotas by label."""
    agents = [AgentSlots(n, tuple(range(count))) for n, count in enumerate(slots, 1)]
    return Cluster(agents, {}, {f"label:{name}": most for name, most in quotas.items()})


def two_pools(policies: Mapping[str, Policy] | None = None, **quotas: int) -> Cluster:
    """Return a cluster with two slots in each of two pools."""
    agents = [AgentSlots(1, (0, 1)), AgentSlots(2, (0, 1), pool="other")]
    labels = {f"label:{name}": most for name, most in quotas.items()}
    return Cluster(agents, policies or {}, labels)


def started(decision: Decision) -> list[int]:
    return [start.request.job.job_id for start in decision.start]


def test_more_important_runs_are_spared() -> None:
    allocations = [
        run(1, 1, 0, 1, priority=90),
        run(2, 1, 2, priority=95),
        run(3, 1, 3, priority=99),
    ]
    assert schedule(cluster(4), [request(9, 3, priority=1)], allocations).preempt == [3, 1]
    alike = [run(1, 1, 0, 1, priority=90), run(2, 1, 2, priority=95), run(3, 1, 3, priority=95)]
    assert schedule(cluster(4), [request(9, 3, priority=1)], alike).preempt == [3, 1]


def test_no_quota_preemption_behind_first_request() -> None:
    allocations = [run(1, 1, 0, 1, priority=10), run(2, 1, 2, 3, priority=90, **X)]
    waiting = [request(3, 4, priority=20), request(4, priority=30, **X)]
    assert schedule(cluster(4, x=2), waiting, allocations).preempt == []
    assert schedule(cluster(4, x=2), waiting[1:], allocations).preempt == [2]


def test_no_slots_reserved_without_quota_preemption() -> None:
    allocations = [run(1, 1, 0, 1, **X)]
    decision = schedule(cluster(3, x=2), [request(2, **X), request(3)], allocations)
    assert (started(decision), decision.preempt) == ([3], [])


def test_slots_reserved_while_quota_runs_stop() -> None:
    allocations = [run(1, 1, 0, stopping=True, priority=90, **X)]
    waiting = [request(2, 2, priority=1, **X), request(3)]
    decision = schedule(cluster(2, x=2), waiting, allocations)
    assert decision == Decision()
    assert decision.waiting[300].startswith("experiment 2 goes first")


def test_own_limit_reserves_no_quota() -> None:
    """Its trials started with fewer slots than the next one needs."""
    first_job = job(1, max_slots=4, **X)
    allocations = [Allocation(number, first_job, {1: (number,)}) for number in range(3)]
    waiting = [request(1, 2, max_slots=4, **X), request(2, position=9.0, **X)]
    decision = schedule(cluster(4, x=4), waiting, allocations)
    assert (started(decision), decision.preempt) == ([2], [])


def test_run_is_preempted_once_for_two_requests() -> None:
    allocations = [run(1, 1, 0, priority=90, groups=("label:x", "label:y"))]
    waiting = [
        request(2, priority=1, **X),
        request(3, priority=2, groups=("label:y",), pool="other"),
    ]
    decision = schedule(two_pools(x=1, y=1), waiting, allocations)
    assert (started(decision), decision.preempt) == ([], [1])


def test_quota_is_reserved_across_pools() -> None:
    allocations = [run(1, 1, 0, 1)]
    waiting = [request(2, **X), request(3, pool="other", **X)]
    decision = schedule(two_pools(x=1), waiting, allocations)
    assert started(decision) == []
    assert decision.waiting[300].endswith("goes first: slots of quota label:x are reserved for it")


def test_fifo_job_has_default_priority_across_pools() -> None:
    fifo = two_pools({"other": Policy.FIFO}, x=1)
    queued = request(2, pool="other", priority=99, **X)
    assert started(schedule(fifo, [queued, request(1, priority=43, **X)], [])) == [2]
    assert started(schedule(fifo, [queued, request(3, priority=41, **X)], [])) == [3]
    urgent = request(2, pool="other", priority=1, **X)
    assert started(schedule(fifo, [urgent, request(3, priority=41, **X)], [])) == [3]


def test_fifo_runs_are_not_preempted_for_a_quota() -> None:
    allocations = [run(1, 2, 0, pool="other", priority=99, **X)]
    urgent = request(2, priority=1, **X)
    fifo = two_pools({"other": Policy.FIFO}, x=1)
    assert schedule(fifo, [urgent], allocations).preempt == []
    assert schedule(two_pools(x=1), [urgent], allocations).preempt == [1]
