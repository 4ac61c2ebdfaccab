"""Reasons of waiting trials, checked against independent sums on random clusters."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from tests.scheduler.test_preemption import some_cluster, some_labels, some_request, some_runs
from zerolab.scheduler import AgentSlots, Allocation, Cluster, Job, Request, queue_key, schedule


def some_queue(rng: Random) -> list[Request]:
    """Return requests of up to four jobs; those of one job exclude different agents."""
    waiting = []
    for job_id in range(1, rng.randint(1, 4) + 1):
        sample = some_request(rng)
        job = replace(
            sample.job,
            job_id=job_id,
            position=float(rng.randint(1, 3)),
            pool=rng.choice(["default", "default", "other"]),
            max_slots=rng.choice([None, None, 2, 6]),
            groups=some_labels(rng),
        )
        for number in range(rng.choice([1, 1, 2])):
            excluded = frozenset(rng.choice([(), (), (1,)]))
            waiting.append(Request(100 * job_id + number, job, 1, excluded))
    return waiting


def most_slots(job: Job, agents: Sequence[AgentSlots], free: dict[int, int]) -> int:
    """Return the most slots, in whole ranks, on the agents of one kind that a job may use."""
    several = 1 if job.single_agent else job.max_agents or len(agents)
    sums = [0]
    for kind in {agent.kind for agent in agents}:
        counts = [
            free[agent.agent_id] // job.unit * job.unit for agent in agents if agent.kind == kind
        ]
        for number in range(1, min(several, len(counts)) + 1):
            sums += [sum(some) for some in itertools.combinations(counts, number)]
    return max(sums)


def check(
    cluster: Cluster, waiting: list[Request], allocations: list[Allocation], seen: Counter
) -> None:
    """Schedule until nothing starts; then check every reason against the allocations."""
    numbers = itertools.count(100)
    while True:
        decision = schedule(cluster, waiting, allocations)
        allocations = [
            replace(run, stopping=run.stopping or run.run_id in decision.preempt)
            for run in allocations
        ]
        if not decision.start:
            break
        allocations += [
            Allocation(next(numbers), start.request.job, start.slots) for start in decision.start
        ]
        started = {start.request.trial_id for start in decision.start}
        waiting = [request for request in waiting if request.trial_id not in started]
    slots_of = Counter[int]()
    for run in allocations:
        slots_of[run.job.job_id] += sum(map(len, run.slots.values()))
    keys = {
        request.trial_id: queue_key(request, cluster, slots_of[request.job.job_id])
        for request in waiting
    }
    jobs = {request.job.job_id: request.job for request in waiting}
    assert decision.waiting.keys() == keys.keys(), "a waiting trial has no reason"
    for request in waiting:
        reason = decision.waiting[request.trial_id]
        seen[check_reason(cluster, request, allocations, reason, keys, jobs, slots_of)] += 1


def check_reason(
    cluster: Cluster,
    request: Request,
    allocations: Sequence[Allocation],
    reason: str,
    keys: dict[int, tuple[float, ...]],
    jobs: dict[int, Job],
    slots_of: Counter[int],
) -> str:
    """Check that a reason is true; return its kind."""
    job = request.job
    usable = [
        agent
        for agent in cluster.agents
        if agent.pool == job.pool and not agent.closed and agent.agent_id not in request.excluded
    ]
    used_slots = {
        agent.agent_id: {slot for run in allocations for slot in run.slots.get(agent.agent_id, ())}
        for agent in usable
    }
    free = {agent.agent_id: len(set(agent.slots) - used_slots[agent.agent_id]) for agent in usable}
    used = {
        group: sum(slots_of_run(run) for run in allocations if group in run.job.groups)
        for group in job.groups
    }
    room = most_slots(job, usable, free)
    possible = most_slots(job, usable, {agent.agent_id: len(agent.slots) for agent in usable})
    if match := re.search(r"there are at most (\d+|none)", reason):
        assert int(match[1].replace("none", "0")) == possible < job.slots
        return "never"
    if (
        "exclude every agent" in reason
        or "no agent of pool" in reason
        or re.search(r"agent  is disabled$", reason)
    ):
        assert possible < job.slots
        return "nowhere"
    if match := re.search(r"quota (\S+) allows (\d+): it cannot", reason):
        assert cluster.quotas[match[1]] == int(match[2]) < job.slots
        return "over a quota"
    if match := re.search(r"resources.max_slots is (\d+): it cannot", reason):
        assert job.max_slots == int(match[1]) < job.slots
        return "over its own"
    assert possible >= job.slots, "a trial waits that cannot start"
    if match := re.search(r"of which (\d+|none) (?:is|are) free", reason):
        assert int(match[1].replace("none", "0")) == room < job.slots
        return "no room"
    if match := re.search(r"holds (\d+) of the (\d+) slots of resources.max_slots", reason):
        assert (int(match[1]), int(match[2])) == (slots_of[job.job_id], job.max_slots)
        assert slots_of[job.job_id] + job.slots > int(match[2])
        return "its own is full"
    if match := re.search(r"(\d+) of the (\d+) of quota (\S+) are held", reason):
        most = cluster.quotas[match[3]]
        assert (int(match[1]), int(match[2])) == (used[match[3]], most)
        assert used[match[3]] + job.slots > most
        return "a quota is full"
    key = keys[request.trial_id]
    if reason == "an earlier trial of its experiment goes first":
        same = [number for number in keys if number // 100 == job.job_id]
        assert any(keys[number] < key for number in same)
        return "earlier"
    match = re.match(r"experiment (\d+) goes first", reason)
    assert match is not None, reason
    first = jobs[int(match[1])]
    assert min(at for number, at in keys.items() if number // 100 == first.job_id) < key
    if reserved := re.search(r"slots of quota (\S+) are reserved for it", reason):
        assert reserved[1] in job.groups
        assert reserved[1] in first.groups
        return "a quota is kept"
    assert first.pool == job.pool
    assert ("could wait longer" in reason) == (room >= job.slots)
    return "slots are kept"


def slots_of_run(run: Allocation) -> int:
    return sum(map(len, run.slots.values()))


def test_reasons_are_true_on_random_clusters() -> None:
    seen = Counter[str]()
    for seed in range(3000):
        rng = Random(seed)
        cluster, waiting = some_cluster(rng), some_queue(rng)
        allocations = some_runs(rng, cluster, waiting[0].job)
        try:
            check(cluster, waiting, allocations, seen)
        except AssertionError as error:
            raise AssertionError(f"{seed}: {cluster}\n{waiting}\n{allocations}") from error
    kinds = {
        "never", "nowhere", "over a quota", "over its own", "no room", "its own is full",
        "a quota is full", "earlier", "a quota is kept", "slots are kept",
    }  # fmt: skip
    assert set(seen) == kinds
    assert min(seen.values()) >= 5, seen
