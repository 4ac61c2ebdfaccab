"""Fair share between users: slot time by weight, over a simulated clock."""

import heapq
import itertools
import random

import pytest

from tests.scheduler.test_schedule import agent, as_running, of, request, started
from zerolab.scheduler import (
    Allocation,
    Cluster,
    Decision,
    Job,
    Policy,
    RecentUsage,
    Request,
    held_by_account,
    queue_order,
    schedule,
)
from zerolab.scheduler.usage import HALF_LIFE_S, recent


def test_users_share_slots_before_jobs() -> None:
    """One user's five jobs get as many slots as another user's only job."""
    waiting = [request(n, trials=6, owner="ann") for n in range(1, 6)]
    waiting.append(request(9, trials=6, owner="bob"))
    decision = schedule(of(agent(1, 8)), waiting, [])
    assert started(decision).count(9) == 4
    assert sorted(started(decision)) == [1, 2, 3, 4, 9, 9, 9, 9]


def test_weight_of_user_and_of_job() -> None:
    waiting = [
        request(1, trials=9, owner="ann", weight=2.0),
        request(2, trials=9, owner="ann"),
        request(3, trials=9, owner="bob", weight=100.0),
    ]
    decision = schedule(of(agent(1, 9), weights={"ann": 2.0}), waiting, [])
    assert [started(decision).count(n) for n in (1, 2, 3)] == [4, 2, 3]


def test_user_with_least_recent_usage_starts_first() -> None:
    waiting = [request(1, owner="ann"), request(2, owner="bob")]
    cluster = of(agent(1, 1), usage={("default", "ann"): 100.0, ("other", "bob"): 1e6})
    assert started(schedule(cluster, waiting, [])) == [2]
    heavier = of(agent(1, 1), usage=cluster.usage | {("default", "bob"): 30.0})
    assert started(schedule(heavier, waiting, [])) == [2]
    weighted = of(agent(1, 1), usage=heavier.usage, weights={"ann": 4.0})
    assert started(schedule(weighted, waiting, [])) == [1]


def test_priority_comes_before_user() -> None:
    waiting = [request(1, owner="ann", priority=10), request(2, owner="bob")]
    usage = {("default", "ann"): 100.0}
    assert started(schedule(of(agent(1, 1), usage=usage), waiting, [])) == [1]


@pytest.mark.parametrize("policy", list(Policy))
def test_queue_order_is_the_order_of_starts(policy: Policy) -> None:
    for seed in range(40):
        numbers = random.Random(seed)
        waiting = [
            request(
                n,
                owner=numbers.choice("abc"),
                priority=numbers.choice([10, 42]),
                weight=numbers.choice([1.0, 2.0]),
                slots=numbers.choice([1, 2]),
                position=numbers.random(),
            )
            for n in range(1, 21)
        ]
        running = [Allocation(n, waiting[n].job, {1: (n,)}) for n in range(3)]
        usage = {("default", owner): numbers.random() * 100 for owner in "abc"}
        cluster = of(agent(1, 99), usage=usage, weights={"a": 2.0}, policies={"default": policy})
        jobs = [item.job for item in waiting]
        order = queue_order(cluster, jobs, [(run.job, 1) for run in running])
        assert order == started(schedule(cluster, waiting, running))


@pytest.mark.parametrize("policy", [Policy.PRIORITY, Policy.FIFO])
def test_other_policies_ignore_users(policy: Policy) -> None:
    waiting = [request(1, trials=3, owner="ann"), request(2, trials=3, owner="bob")]
    cluster = of(agent(1, 4), policies={"default": policy}, usage={("default", "ann"): 9.0})
    assert started(schedule(cluster, waiting, [])) == [1, 1, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_single_user_changes_no_decision(seed: int) -> None:
    """With one user, names, weights and usage have no effect."""
    generator = random.Random(seed)

    def requests(owner: str) -> list[Request]:
        generator.seed(seed)
        return [
            request(
                n, generator.choice([1, 2, 4]), generator.choice([1, 5]), owner=owner,
                weight=generator.choice([0.5, 1.0, 3.0]), priority=generator.choice([1, 42]),
                pool=generator.choice(["default", "big"]), groups=("label:x",),
            )
            for n in range(1, 12)
        ]  # fmt: skip

    def decide(owner: str, **shares: object) -> Decision:
        jobs = requests(owner)
        agents = agent(1, 6), agent(2, 5), agent(3, 8, pool="big")
        cluster = of(*agents, quotas={"label:x": 15}, **shares)
        held = as_running(schedule(cluster, jobs[:4], []).start)
        return schedule(cluster, jobs[4:], held)

    def summary(decision: Decision) -> tuple[object, ...]:
        starts = [(start.request.trial_id, start.slots) for start in decision.start]
        return starts, decision.preempt, decision.impossible, decision.waiting

    alone = decide("ann", weights={"ann": 3.0}, usage={("default", "ann"): 1e5})
    assert summary(alone) == summary(decide(""))


def test_recent_usage_halves() -> None:
    usage = RecentUsage(0.0, {("default", "ann"): 800.0}, {})
    later = usage.advance(HALF_LIFE_S)
    assert later.slot_seconds == {("default", "ann"): pytest.approx(400.0)}
    assert later.advance(HALF_LIFE_S) is later


def test_recent_usage_is_that_of_its_runs() -> None:
    """Advancing in steps equals the sum over the runs, with which a restarted server begins."""
    usage = RecentUsage(0.0, {}, {("p", "ann"): 2})
    usage = usage.advance(100.0)
    usage = RecentUsage(usage.at, usage.slot_seconds, {("p", "ann"): 3}).advance(5000.0)
    expected = recent(2, 0.0, 5000.0, 5000.0) + recent(1, 100.0, 5000.0, 5000.0)
    assert usage.slot_seconds["p", "ann"] == pytest.approx(expected)
    assert recent(1, 0.0, 100.0, 100.0) == pytest.approx(100.0, rel=0.01)


WEIGHTS = {f"user{n}": (1.0, 1.0, 2.0, 3.0)[n % 4] for n in range(20)}


def test_slot_time_follows_weights() -> None:
    """20 users with 200 experiments on 3 agents get slot time within 5 % of their weights."""
    generator = random.Random(1)
    agents = [agent(n, 8) for n in (1, 2, 3)]
    requests = [
        Request(
            n,
            Job(
                job_id=n, slots=1, position=float(n), weight=generator.choice([1.0, 4.0]),
                # The first users have most of the experiments, which are first in the queue.
                owner=f"user{min(generator.randrange(20), generator.randrange(20))}"
                if n > 20 else f"user{n - 1}",
            ),
            10_000,
        )
        for n in range(1, 201)
    ]  # fmt: skip
    now, numbers = 0.0, itertools.count(1)
    held: dict[int, Allocation] = {}
    ends: list[tuple[float, int]] = []
    usage = RecentUsage(0.0, {}, {})
    received = dict.fromkeys(WEIGHTS, 0.0)
    for _ in range(1500):
        usage = usage.advance(now)
        cluster = Cluster(agents, weights=WEIGHTS, usage=usage.slot_seconds)
        for start in schedule(cluster, requests, list(held.values())).start:
            run = next(numbers)
            held[run] = Allocation(run, start.request.job, start.slots)
            heapq.heappush(ends, (now + 300 * generator.uniform(0.5, 1.5), run))
        assert sum(len(ids) for run in held.values() for ids in run.slots.values()) == 24
        usage = RecentUsage(usage.at, usage.slot_seconds, held_by_account(held.values()))
        end, run = heapq.heappop(ends)
        for allocation in held.values():
            received[allocation.job.owner] += end - now
        now = end
        held.pop(run)
    total, weight = sum(received.values()), sum(WEIGHTS.values())
    errors = [received[user] / total / (WEIGHTS[user] / weight) - 1 for user in WEIGHTS]
    assert max(map(abs, errors)) < 0.05, errors
