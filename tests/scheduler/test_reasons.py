"""What a trial is told of why it waits, against what is so: random clusters, and all sums anew."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from tests.scheduler.test_preemption import some_cluster, some_labels, some_request, some_runs
from zerolab.scheduler import AgentSlots, Allocation, Cluster, Job, Request, schedule, turn


def some_queue(rng: Random) -> list[Request]:
    """Requests of up to four jobs; those of one job differ in the agents that are ruled out."""
    waiting = []
    for job_id in range(1, rng.randint(1, 4) + 1):
        one = some_request(rng)
        job = replace(
            one.job,
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
    """The most slots for whole ranks on as many agents of a kind as a job may take."""
    several = 1 if job.single_agent else job.max_agents or len(agents)
    sums = [0]
    for kind in {each.kind for each in agents}:
        counts = [
            free[each.agent_id] // job.unit * job.unit for each in agents if each.kind == kind
        ]
        for number in range(1, min(several, len(counts)) + 1):
            sums += [sum(some) for some in itertools.combinations(counts, number)]
    return max(sums)


def check(cluster: Cluster, waiting: list[Request], held: list[Allocation], seen: Counter) -> None:
    """Schedule until nothing starts any more; then all that is told is about what is held now."""
    numbers = itertools.count(100)
    while True:
        decision = schedule(cluster, waiting, held)
        held = [
            replace(run, stopping=run.stopping or run.run_id in decision.preempt) for run in held
        ]
        if not decision.start:
            break
        held += [Allocation(next(numbers), one.request.job, one.slots) for one in decision.start]
        started = {one.request.trial_id for one in decision.start}
        waiting = [each for each in waiting if each.trial_id not in started]
    slots_of = Counter[int]()
    for run in held:
        slots_of[run.job.job_id] += sum(map(len, run.slots.values()))
    ahead = {each.trial_id: turn(each, cluster, slots_of[each.job.job_id]) for each in waiting}
    homes = {each.job.job_id: each.job for each in waiting}
    assert decision.waiting.keys() == ahead.keys(), "somebody waits and is told nothing"
    for each in waiting:
        told = decision.waiting[each.trial_id]
        seen[is_so(cluster, each, held, told, ahead, homes, slots_of)] += 1


def is_so(
    cluster: Cluster,
    request: Request,
    held: Sequence[Allocation],
    told: str,
    ahead: dict[int, tuple[float, ...]],
    homes: dict[int, Job],
    slots_of: Counter[int],
) -> str:
    """See that a reason is true; return which kind it is."""
    job = request.job
    there = [
        each
        for each in cluster.agents
        if each.pool == job.pool and not each.closed and each.agent_id not in request.excluded
    ]
    taken = {
        each.agent_id: {slot for run in held for slot in run.slots.get(each.agent_id, ())}
        for each in there
    }
    free = {each.agent_id: len(set(each.slots) - taken[each.agent_id]) for each in there}
    used = {
        group: sum(slots_of_run(run) for run in held if group in run.job.groups)
        for group in job.groups
    }
    room = most_slots(job, there, free)
    ever = most_slots(job, there, {each.agent_id: len(each.slots) for each in there})
    if found := re.search(r"there are at most (\d+|none)", told):
        assert int(found[1].replace("none", "0")) == ever < job.slots
        return "never"
    if "rule out" in told or "no agent of pool" in told or re.search(r"agent  is disabled$", told):
        assert ever < job.slots
        return "nowhere"
    if found := re.search(r"quota (\S+) allows (\d+): it cannot", told):
        assert cluster.quotas[found[1]] == int(found[2]) < job.slots
        return "over a quota"
    if found := re.search(r"resources.max_slots is (\d+): it cannot", told):
        assert job.max_slots == int(found[1]) < job.slots
        return "over its own"
    assert ever >= job.slots, "it is told to wait, and waits for nothing"
    if found := re.search(r"of which (\d+|none) (?:is|are) free", told):
        assert int(found[1].replace("none", "0")) == room < job.slots
        return "no room"
    if found := re.search(r"holds (\d+) of the (\d+) slots of resources.max_slots", told):
        assert (int(found[1]), int(found[2])) == (slots_of[job.job_id], job.max_slots)
        assert slots_of[job.job_id] + job.slots > int(found[2])
        return "its own is full"
    if found := re.search(r"(\d+) of the (\d+) of quota (\S+) are held", told):
        most = cluster.quotas[found[3]]
        assert (int(found[1]), int(found[2])) == (used[found[3]], most)
        assert used[found[3]] + job.slots > most
        return "a quota is full"
    mine = ahead[request.trial_id]
    if told == "an earlier trial of its experiment goes first":
        same = [number for number in ahead if number // 100 == job.job_id]
        assert any(ahead[number] < mine for number in same)
        return "earlier"
    found = re.match(r"experiment (\d+) goes first", told)
    assert found is not None, told
    first = homes[int(found[1])]
    assert min(at for number, at in ahead.items() if number // 100 == first.job_id) < mine
    if kept := re.search(r"slots of quota (\S+) are kept for it", told):
        assert kept[1] in job.groups
        assert kept[1] in first.groups
        return "a quota is kept"
    assert first.pool == job.pool
    assert ("could have to wait longer" in told) == (room >= job.slots)
    return "slots are kept"


def slots_of_run(run: Allocation) -> int:
    return sum(map(len, run.slots.values()))


def test_what_a_trial_is_told_of_its_wait_is_so() -> None:
    seen = Counter[str]()
    for seed in range(3000):
        rng = Random(seed)
        cluster, waiting = some_cluster(rng), some_queue(rng)
        held = some_runs(rng, cluster, waiting[0].job)
        try:
            check(cluster, waiting, held, seen)
        except AssertionError as error:
            raise AssertionError(f"{seed}: {cluster}\n{waiting}\n{held}") from error
    kinds = {
        "never", "nowhere", "over a quota", "over its own", "no room", "its own is full",
        "a quota is full", "earlier", "a quota is kept", "slots are kept",
    }  # fmt: skip
    assert set(seen) == kinds
    assert min(seen.values()) >= 5, seen
