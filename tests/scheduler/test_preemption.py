"""Who must make room, against every set of runs that could be asked; and who is asked for nobody.

``test_model.py`` lives through many rounds, of which few preempt anybody in a way that a mistake
would show. Here one trial waits, and what is right is found by trying all sets.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

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


def some_runs(rng: Random, cluster: Cluster, mine: Job) -> list[Allocation]:
    """On slots of one pool each, some of which have been disabled since; most slots are held."""
    free = {one.agent_id: [*one.slots, len(one.slots)] for one in cluster.agents}
    held = []
    for run_id in rng.sample(range(1, 8), rng.randint(1, 7)):
        pool = rng.choice(cluster.agents).pool
        slots: dict[int, tuple[int, ...]] = {}
        for agent in cluster.agents:
            if agent.pool == pool and rng.random() < 0.6 and free[agent.agent_id]:
                there = free[agent.agent_id]
                slots[agent.agent_id] = tuple(there.pop(0) for _ in there[: rng.randint(1, 2)])
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
        own = pool == mine.pool and rng.random() < 0.1
        job = replace(mine, slots=number) if own else other
        held.append(Allocation(run_id, job, slots, stopping=rng.random() < 0.2))
    return held


def has_quota(cluster: Cluster, job: Job, there: Sequence[Allocation], *, own: bool) -> bool:
    """Whether what its labels, or its own ``max_slots``, allow suffices beside these runs."""
    if own:
        mine = sum(run.job.slots for run in there if run.job.job_id == job.job_id)
        return job.max_slots is None or mine + job.slots <= job.max_slots
    return all(
        sum(run.job.slots for run in there if group in run.job.groups) + job.slots
        <= cluster.quotas.get(group, 99)
        for group in job.groups
    )


def has_slots(cluster: Cluster, request: Request, there: Sequence[Allocation]) -> bool:
    """Whether some agents of one kind, and not too many, have the free slots."""
    job = request.job
    free: defaultdict[str, list[int]] = defaultdict(list)
    for agent in cluster.agents:
        if agent.pool == job.pool and not agent.closed and agent.agent_id not in request.excluded:
            taken = {slot for run in there for slot in run.slots.get(agent.agent_id, ())}
            free[agent.kind].append(len(set(agent.slots) - taken))
    most = 1 if job.single_agent else job.max_agents or 9
    return any(
        sum(count // job.unit * job.unit for count in some) >= job.slots
        for counts in free.values()
        for number in range(1, most + 1)
        for some in itertools.combinations(counts, number)
    )


def who_must_leave(cluster: Cluster, request: Request, held: Sequence[Allocation]) -> set[int]:
    """By trying every set: the one that spares the most important run it can, then the next."""

    def starts(there: Sequence[Allocation]) -> bool:
        slots = has_slots(cluster, request, there)
        return slots and has_quota(cluster, request.job, there, own=False)

    stay = [run for run in held if not run.stopping]
    if not has_quota(cluster, request.job, held, own=True) or starts(stay):
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
    # They are tried in that order: the first that serves leaves the most important ones alone.
    for leave in itertools.product([False, True], repeat=len(most_important_first)):
        left = {run.run_id for run, gone in zip(most_important_first, leave, strict=True) if gone}
        if starts([run for run in stay if run.run_id not in left]):
            return left
    return set()


def check(cluster: Cluster, request: Request, held: Sequence[Allocation]) -> Decision:
    decision = schedule(cluster, [request], held)
    assert set(decision.preempt) == who_must_leave(cluster, request, held)
    assert len(set(decision.preempt)) == len(decision.preempt)
    asked = [run.run_id in decision.preempt or run.stopping for run in held]
    told = decision.waiting.get(100, "")
    if "of which" in told:
        mine = {
            (each.agent_id, slot)
            for each in cluster.agents
            if each.pool == request.job.pool and not each.closed
            for slot in each.slots
            if each.agent_id not in request.excluded
        }
        there = any(
            gone
            and any((number, slot) in mine for number, ids in run.slots.items() for slot in ids)
            for run, gone in zip(held, asked, strict=True)
        )
        assert ("other runs are asked to make room" in told) == (there or bool(decision.preempt))
    leaving = [replace(run, stopping=gone) for run, gone in zip(held, asked, strict=True)]
    if not decision.start:
        assert schedule(cluster, [request], leaving) == replace(decision, preempt=[])
    if decision.preempt:
        assert schedule(cluster, [request], [run for run in leaving if not run.stopping]).start
    return decision


def test_those_leave_whom_trying_every_set_finds() -> None:
    asked: Counter[int] = Counter()
    for seed in range(8000):
        rng = Random(seed)
        cluster, request = some_cluster(rng), some_request(rng)
        held = some_runs(rng, cluster, request.job)
        try:
            asked[len(check(cluster, request, held).preempt)] += 1
        except AssertionError as error:
            raise AssertionError(f"{cluster}\n{request}\n{held}") from error
    assert asked[1] > 500
    assert asked[2] + asked[3] > 100


# -- several that wait -----------------------------------------------------------------------

X = {"groups": ("label:x",)}


def job(job_id: int, slots: int = 1, **more: Any) -> Job:
    return Job(
        job_id=job_id, slots=slots, **{"position": float(job_id), "single_agent": True, **more}
    )


def request(job_id: int, slots: int = 1, **more: Any) -> Request:
    return Request(100 * job_id, job(job_id, slots, **more))


def run(run_id: int, agent: int, *slots: int, stopping: bool = False, **more: Any) -> Allocation:
    mine = job(1000 + run_id, len(slots), **more)
    return Allocation(run_id, mine, {agent: slots}, stopping)


def cluster(*slots: int, **quotas: int) -> Cluster:
    """Agents of the pool ``default`` with so many slots each, and quotas by label."""
    agents = [AgentSlots(n, tuple(range(each))) for n, each in enumerate(slots, 1)]
    return Cluster(agents, {}, {f"label:{name}": most for name, most in quotas.items()})


def two_pools(policies: Mapping[str, Policy] | None = None, **quotas: int) -> Cluster:
    """Two slots in each of two pools."""
    agents = [AgentSlots(1, (0, 1)), AgentSlots(2, (0, 1), pool="other")]
    labels = {f"label:{name}": most for name, most in quotas.items()}
    return Cluster(agents, policies or {}, labels)


def started(decision: Decision) -> list[int]:
    return [start.request.job.job_id for start in decision.start]


def test_of_those_that_would_do_the_more_important_stay() -> None:
    held = [run(1, 1, 0, 1, priority=90), run(2, 1, 2, priority=95), run(3, 1, 3, priority=99)]
    assert schedule(cluster(4), [request(9, 3, priority=1)], held).preempt == [3, 1]
    alike = [run(1, 1, 0, 1, priority=90), run(2, 1, 2, priority=95), run(3, 1, 3, priority=95)]
    assert schedule(cluster(4), [request(9, 3, priority=1)], alike).preempt == [3, 1]


def test_behind_one_that_waits_for_slots_nobody_is_asked_to_make_room_in_a_quota() -> None:
    held = [run(1, 1, 0, 1, priority=10), run(2, 1, 2, 3, priority=90, **X)]
    waiting = [request(3, 4, priority=20), request(4, priority=30, **X)]
    assert schedule(cluster(4, x=2), waiting, held).preempt == []
    assert schedule(cluster(4, x=2), waiting[1:], held).preempt == [2]


def test_no_slot_is_kept_for_one_whose_quota_nobody_leaves() -> None:
    held = [run(1, 1, 0, 1, **X)]
    decision = schedule(cluster(3, x=2), [request(2, **X), request(3)], held)
    assert (started(decision), decision.preempt) == ([3], [])


def test_slots_are_kept_for_one_whose_quota_is_being_left_already() -> None:
    held = [run(1, 1, 0, stopping=True, priority=90, **X)]
    waiting = [request(2, 2, priority=1, **X), request(3)]
    decision = schedule(cluster(2, x=2), waiting, held)
    assert decision == Decision()
    assert decision.waiting[300].startswith("experiment 2 goes first")


def test_one_that_waits_for_its_own_trials_keeps_nothing_of_a_quota() -> None:
    """Its trials have started with fewer slots than the next one wants."""
    mine = job(1, max_slots=4, **X)
    held = [Allocation(number, mine, {1: (number,)}) for number in range(3)]
    waiting = [request(1, 2, max_slots=4, **X), request(2, position=9.0, **X)]
    decision = schedule(cluster(4, x=4), waiting, held)
    assert (started(decision), decision.preempt) == ([2], [])


def test_a_run_that_two_wait_for_is_asked_once() -> None:
    held = [run(1, 1, 0, priority=90, groups=("label:x", "label:y"))]
    waiting = [
        request(2, priority=1, **X),
        request(3, priority=2, groups=("label:y",), pool="other"),
    ]
    decision = schedule(two_pools(x=1, y=1), waiting, held)
    assert (started(decision), decision.preempt) == ([], [1])


def test_the_quota_of_one_that_waits_for_slots_is_kept_for_it_in_other_pools_too() -> None:
    held = [run(1, 1, 0, 1)]
    waiting = [request(2, **X), request(3, pool="other", **X)]
    decision = schedule(two_pools(x=1), waiting, held)
    assert started(decision) == []
    assert decision.waiting[300].endswith("goes first: slots of quota label:x are kept for it")


def test_a_job_of_a_fifo_pool_has_the_usual_priority_among_those_of_other_pools() -> None:
    fifo = two_pools({"other": Policy.FIFO}, x=1)
    queued = request(2, pool="other", priority=99, **X)
    assert started(schedule(fifo, [queued, request(1, priority=43, **X)], [])) == [2]
    assert started(schedule(fifo, [queued, request(3, priority=41, **X)], [])) == [3]
    urgent = request(2, pool="other", priority=1, **X)
    assert started(schedule(fifo, [urgent, request(3, priority=41, **X)], [])) == [3]


def test_runs_of_a_fifo_pool_are_not_asked_to_make_room_in_a_quota() -> None:
    held = [run(1, 2, 0, pool="other", priority=99, **X)]
    urgent = request(2, priority=1, **X)
    fifo = two_pools({"other": Policy.FIFO}, x=1)
    assert schedule(fifo, [urgent], held).preempt == []
    assert schedule(two_pools(x=1), [urgent], held).preempt == [1]
