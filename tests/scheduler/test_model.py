"""Scheduler against a model of its rules under random arrivals, ends, preemptions and rounds.

The model is independent of the implementation. It has its own accounts, and tries every order in
which runs could end.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from zerolab.scheduler import (
    AgentSlots,
    Allocation,
    Cluster,
    Decision,
    Job,
    Policy,
    Request,
    backfill_limit,
    schedule,
)

POOLS = ("default", "other")

agents = st.lists(
    st.builds(
        lambda number, slots, pool, closed, off: AgentSlots(
            number, tuple(range(slots))[off:], pool=pool, name=f"a{number}", closed=closed
        ),
        st.integers(1, 4),
        st.integers(0, 5),
        st.sampled_from(["default", *POOLS]),
        st.sampled_from(["", "", "", "is disabled"]),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda agent: agent.agent_id,
)
quotas = st.dictionaries(
    st.sampled_from(["label:x", "label:y", "pool:default"]), st.integers(0, 6), max_size=2
)
policies = st.dictionaries(st.sampled_from(POOLS), st.sampled_from(list(Policy)))
OWNERS = ("", "ann", "bob")
weights = st.dictionaries(st.sampled_from(OWNERS), st.sampled_from([0.5, 2.0]))
usage = st.dictionaries(
    st.tuples(st.sampled_from(POOLS), st.sampled_from(OWNERS)), st.sampled_from([5.0, 20.0])
)
clusters = st.builds(Cluster, agents, policies, quotas, weights, usage)
labels = st.lists(st.sampled_from(["label:x", "label:y"]), unique=True, max_size=2)


def jobs(job_id: int) -> st.SearchStrategy[Job]:
    return st.builds(
        lambda slots, position, pool, priority, weight, most, groups, owner: Job(
            job_id=job_id,
            slots=slots,
            position=position,
            pool=pool,
            priority=priority,
            weight=weight,
            max_slots=most,
            groups=(f"pool:{pool}", *groups),
            single_agent=True,
            owner=owner,
        ),
        st.sampled_from([1, 1, 2, 3, 5]),
        st.floats(0, 9),
        st.sampled_from(POOLS),
        st.sampled_from([42, 42, 42, 1, 99]),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.sampled_from([None, None, 3, 6]),
        labels,
        st.sampled_from(OWNERS),
    )


WIDE = {  # slots, max_agents, unit, fewer
    "one": (1, None, 1, ()),
    "anywhere": (4, None, 1, ()),
    "on two": (6, 2, 1, ()),
    "in pairs": (4, None, 2, ()),
    "elastic": (4, None, 1, (3, 1)),
    "elastic pairs": (6, 3, 2, (4, 2)),
    "elastic on one": (3, 1, 1, (2,)),
}


def wide_jobs(job_id: int) -> st.SearchStrategy[Job]:
    """Jobs whose trials may span several agents, or start with fewer slots."""

    def widened(job: Job, shape: str) -> Job:
        slots, most, unit, fewer = WIDE[shape]
        wide = {"slots": slots, "max_agents": most, "unit": unit, "fewer": fewer}
        return replace(job, single_agent=False, **wide)  # type: ignore[arg-type]

    return st.builds(widened, jobs(job_id), st.sampled_from(sorted(WIDE)))


def charged(job: Job, group: str) -> bool:
    return group in {*job.groups, f"experiment:{job.job_id}"}


def limits(cluster: Cluster, job: Job) -> dict[str, int]:
    shared = {group: most for group, most in cluster.quotas.items() if charged(job, group)}
    per_job = {} if job.max_slots is None else {f"experiment:{job.job_id}": job.max_slots}
    return shared | per_job


def used(allocations: Iterable[Allocation], group: str) -> int:
    return sum(
        len(ids) for run in allocations if charged(run.job, group) for ids in run.slots.values()
    )


def could_start(cluster: Cluster, request: Request, allocations: Sequence[Allocation]) -> bool:
    """Return true if a trial could start in addition to these runs."""
    job = request.job
    free = list(free_slots(cluster, request, allocations).values())
    return any(
        slots_fit(job, size, free)
        and all(
            used(allocations, group) + size <= most for group, most in limits(cluster, job).items()
        )
        for size in (job.slots, *job.fewer)
    )


def slots_fit(job: Job, size: int, free: Sequence[int]) -> bool:
    """Return true if the slots are free on one agent, or on the allowed number of agents."""
    if any(count >= size for count in free):
        return True
    most = 1 if job.single_agent else job.max_agents or len(free)
    shares = sorted((count - count % job.unit for count in free), reverse=True)
    return most > 1 and sum(shares[:most]) >= size


def free_slots(
    cluster: Cluster, request: Request, allocations: Sequence[Allocation]
) -> dict[int, int]:
    used_slots = {(a, slot) for run in allocations for a, ids in run.slots.items() for slot in ids}
    return {
        agent.agent_id: sum((agent.agent_id, slot) not in used_slots for slot in agent.slots)
        for agent in cluster.agents
        if agent.pool == request.job.pool
        and not agent.closed
        and agent.agent_id not in request.excluded
    }


def unused_slots(slots: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Return as many unused slot ids of the same agents; :func:`delays` removes real slots."""
    return {agent: tuple(range(1000, 1000 + len(ids))) for agent, ids in slots.items()}


def on(cluster: Cluster, agent_id: int, request: Request) -> Allocation:
    """Return an allocation of ``request`` on an agent; the slot ids do not matter."""
    return Allocation(999, request.job, unused_slots({agent_id: range(request.job.slots)}))


def delays(
    cluster: Cluster, first: Request, extra: Allocation, allocations: Sequence[Allocation]
) -> bool:
    """Whether some order of ends makes ``first`` wait longer because of ``extra``."""
    smaller = shrunk(cluster, extra, allocations)
    for number in range(len(allocations) + 1):
        for staying in itertools.combinations(allocations, number):
            if could_start(cluster, first, staying) and not could_start(
                smaller, first, [*staying, extra]
            ):
                return True
    return False


def shrunk(cluster: Cluster, extra: Allocation, allocations: Sequence[Allocation]) -> Cluster:
    """Return the cluster without as many free slots as ``extra`` takes."""
    used_slots = {(a, slot) for run in allocations for a, ids in run.slots.items() for slot in ids}
    smaller = []
    for agent in cluster.agents:
        free = [slot for slot in agent.slots if (agent.agent_id, slot) not in used_slots]
        removed = free[: len(extra.slots.get(agent.agent_id, ()))]
        remaining = tuple(slot for slot in agent.slots if slot not in removed)
        smaller.append(replace(agent, slots=remaining))
    return Cluster(smaller, cluster.policies, cluster.quotas, cluster.weights, cluster.usage)


def check_accounts(cluster: Cluster, before: Sequence[Allocation], decision: Decision) -> None:
    """Check that slots are exclusive, starts complete, agents open and quotas kept."""
    allocations = [*before]
    agents_by_id = {agent.agent_id: agent for agent in cluster.agents}
    used_slots = Counter(
        (a, slot) for run in before for a, ids in run.slots.items() for slot in ids
    )
    for start in decision.start:
        job = start.request.job
        assert sum(map(len, start.slots.values())) in {job.slots, *job.fewer}
        most = 1 if job.single_agent else job.max_agents
        assert len(start.slots) <= (most or len(agents_by_id))
        assert len(start.slots) == 1 or all(
            len(ids) % job.unit == 0 for ids in start.slots.values()
        )
        for agent_id, ids in start.slots.items():
            agent = agents_by_id[agent_id]
            assert agent.pool == job.pool
            assert not agent.closed
            assert agent_id not in start.request.excluded
            assert set(ids) <= set(agent.slots)
            used_slots.update((agent_id, slot) for slot in ids)
        allocations.append(Allocation(0, job, start.slots))
        for group, most in limits(cluster, job).items():
            assert used(allocations, group) <= most
    assert all(number == 1 for number in used_slots.values())


def is_shared(waiting: Iterable[Request]) -> bool:
    """Whether several users wait in one pool."""
    accounts = {request.job.account for request in waiting}
    return len(accounts) > len({pool for pool, _ in accounts})


def order_of(
    cluster: Cluster, request: Request, allocations: Sequence[Allocation], *, is_shared: bool
) -> tuple[float, ...]:
    """Return the documented order: priority, shares of user and job, then position."""
    job = request.job
    policy = cluster.policies.get(job.pool, Policy.FAIR_SHARE)
    job_slots = sum(
        len(ids)
        for run in allocations
        if run.job.job_id == job.job_id
        for ids in run.slots.values()
    )
    user_slots = sum(
        len(ids)
        for run in allocations
        if (run.job.pool, run.job.owner) == (job.pool, job.owner)
        for ids in run.slots.values()
    )
    user_share = 10 * user_slots + cluster.usage.get((job.pool, job.owner), 0)
    user_share /= cluster.weights.get(job.owner, 1.0)
    return (
        42 if policy == Policy.FIFO else job.priority,
        user_share if policy == Policy.FAIR_SHARE and is_shared else 0,
        job_slots / job.weight if policy == Policy.FAIR_SHARE else 0,
        job.position,
        request.trial_id,
    )


def check_order(
    cluster: Cluster, waiting: Sequence[Request], before: Sequence[Allocation], decision: Decision
) -> None:
    """Check that nothing starts while the first request fits, nor where that delays it.

    Delays are checked only if the first request waits for slots alone, without quotas.
    """
    allocations = [*before]
    remaining = Counter({candidate.trial_id: candidate.trials for candidate in waiting})
    remaining.subtract(start.request.trial_id for start in decision.start)
    stay = [
        candidate
        for candidate in waiting
        if remaining[candidate.trial_id] > 0 and could_start(cluster, candidate, [])
    ]
    shared = is_shared(waiting)

    def order(queued: Request) -> tuple[float, ...]:
        return order_of(cluster, queued, allocations, is_shared=shared)

    for start in decision.start:
        allocation = Allocation(0, start.request.job, start.slots)
        first = min(stay, key=order, default=start.request)
        if order(first) < order(start.request):
            assert not could_start(cluster, first, allocations), (first, start)
            both_single = first.job.single_agent and start.request.job.single_agent
            if both_single and not limits(cluster, first.job) and len(allocations) <= 6:
                extra = Allocation(999, start.request.job, unused_slots(start.slots))
                assert not delays(cluster, first, extra, allocations), (first, start)
        allocations.append(allocation)


def check_preemption(
    cluster: Cluster,
    waiting: Sequence[Request],
    allocations: Sequence[Allocation],
    decision: Decision,
) -> None:
    """Check that preemption serves a higher priority, respects FIFO pools, and helps.

    The runs of lowest priority stop first, and of those the newest, if all have one size.
    """
    runs = {run.run_id: run for run in allocations}
    for run_id in decision.preempt:
        victim = runs[run_id].job
        assert not runs[run_id].stopping
        assert cluster.policy(victim.pool) != Policy.FIFO
        assert any(
            request.job.priority < victim.priority
            and cluster.policy(request.job.pool) != Policy.FIFO
            for request in waiting
        )
    started = [Allocation(0, start.request.job, start.slots) for start in decision.start]
    staying = [
        run for run in allocations if not run.stopping and run.run_id not in decision.preempt
    ]
    if decision.preempt:
        ready = [
            request for request in waiting if could_start(cluster, request, [*staying, *started])
        ]
        assert ready, "preemption without any trial that can start"
    check_victims(cluster, allocations, decision)
    check_waiting(cluster, waiting, [*allocations, *started], decision)


def check_victims(cluster: Cluster, allocations: Sequence[Allocation], decision: Decision) -> None:
    """Of runs that differ only in priority and age, check that the least important are
    preempted."""
    alike = {
        (run.job.pool, tuple(run.slots), run.job.slots)
        for run in allocations
        if not run.stopping
    }  # fmt: skip
    if len(alike) != 1 or any(
        group != "pool" for run in allocations for group in quota_kinds(cluster)
    ):
        return
    order = sorted(allocations, key=lambda run: (-run.job.priority, -run.run_id))
    preempted = [run for run in order if run.run_id in decision.preempt]
    spared = [run for run in order if run.run_id not in decision.preempt and not run.stopping]
    if preempted and spared and len({run.job.max_slots for run in allocations}) == 1:
        assert order.index(preempted[-1]) < order.index(spared[0])


def quota_kinds(cluster: Cluster) -> set[str]:
    return {group.partition(":")[0] for group in cluster.quotas}


def check_waiting(
    cluster: Cluster,
    waiting: Sequence[Request],
    allocations: Sequence[Allocation],
    decision: Decision,
) -> None:
    """Check that the single most important request of a pool waits for no less important run.

    Skipped with quotas, own limits, or when a trial started in this round.
    """
    if cluster.quotas or decision.start:
        return
    for pool in POOLS:
        startable = [
            request
            for request in waiting
            if request.job.pool == pool and could_start(cluster, request, [])
        ]
        if not startable or cluster.policy(pool) == Policy.FIFO:
            continue
        most = min(request.job.priority for request in startable)
        firsts = [request for request in startable if request.job.priority == most]
        if len(firsts) > 1 or any(request.job.max_slots is not None for request in startable):
            continue
        (first,) = firsts
        stay = [
            run for run in allocations if not run.stopping and run.run_id not in decision.preempt
        ]
        if not could_start(cluster, first, stay):
            matter = [run for run in stay if run.job.priority <= most]
            assert not could_start(cluster, first, matter), (first, stay)


class ClusterModel(RuleBasedStateMachine):
    """Random lifecycle of jobs and agents; the accounts are checked after each round."""

    make_job = staticmethod(jobs)

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster([])
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Allocation] = {}
        self.trial_of: dict[int, Request] = {}
        self.numbers = itertools.count(1)
        self.last = Decision()
        self.stable = False
        self.jobs_since = 0
        """Number of jobs that must arrive before the agents change again."""

    @precondition(lambda self: not self.jobs_since)
    @rule(cluster=clusters)
    def replace_agents(self, cluster: Cluster) -> None:
        slots_of = {agent.agent_id: set(agent.slots) for agent in cluster.agents}
        for run_id, run in list(self.running.items()):
            if any(not set(ids) <= slots_of.get(a, set()) for a, ids in run.slots.items()):
                self.end(run_id)
        self.cluster = cluster
        self.stable = False
        self.jobs_since = 6

    @rule(data=st.data(), trials=st.integers(1, 3), excluded=st.sampled_from([(), (), (1,)]))
    def submit_jobs(self, data: st.DataObject, trials: int, excluded: tuple[int, ...]) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            number = next(self.numbers)
            job = data.draw(self.make_job(number))
            self.waiting[number] = Request(number * 100, job, trials, frozenset(excluded))
            self.jobs_since = max(self.jobs_since - 1, 0)
        self.stable = False

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_random_run(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))))
        self.stable = False

    def end(self, run_id: int) -> None:
        run = self.running.pop(run_id)
        request = self.trial_of.pop(run_id)
        if run.stopping:  # it was preempted: its trial waits again
            waiting = self.waiting.get(run.job.job_id)
            trials = 1 if waiting is None else waiting.trials + 1
            self.waiting[run.job.job_id] = request._replace(trials=trials)

    @rule()
    def schedule_until_stable(self) -> None:
        """Repeat rounds with quotas, since a start can free reserved slots."""
        new: set[int] = set()
        for _ in range(5):
            known_runs = set(self.running)
            self.schedule_once()
            assert not new & set(self.last.preempt), "a run was preempted right after its start"
            new |= self.running.keys() - known_runs
            if not (self.last.start and self.cluster.quotas):
                return
        raise AssertionError("rounds keep starting trials")

    def schedule_once(self) -> None:
        waiting, allocations = list(self.waiting.values()), list(self.running.values())
        decision = schedule(self.cluster, waiting, allocations)
        assert schedule(self.cluster, reversed(waiting), allocations) == decision
        check_accounts(self.cluster, allocations, decision)
        check_order(self.cluster, waiting, allocations, decision)
        check_preemption(self.cluster, waiting, allocations, decision)
        started = Counter(start.request.job.job_id for start in decision.start)
        for start in decision.start:
            run_id = next(self.numbers)
            self.running[run_id] = Allocation(run_id, start.request.job, start.slots)
            self.trial_of[run_id] = start.request
        for job_id, number in started.items():
            request = self.waiting.pop(job_id)
            if request.trials > number:
                self.waiting[job_id] = request._replace(trials=request.trials - number)
        assert {request.trial_id for request in self.waiting.values()} == set(decision.waiting)
        assert all(decision.waiting.values())
        for run_id in decision.preempt:
            run = self.running[run_id]
            self.running[run_id] = Allocation(run_id, run.job, run.slots, stopping=True)
        self.last, self.stable = decision, True

    def turn(self, request: Request) -> tuple[float, ...]:
        """Return the current order of a request."""
        allocations, shared = list(self.running.values()), is_shared(self.waiting.values())
        return order_of(self.cluster, request, allocations, is_shared=shared)

    @invariant()
    def round_is_stable(self) -> None:
        if self.stable:
            allocations = list(self.running.values())
            again = schedule(self.cluster, self.waiting.values(), allocations)
            assert (again.start, again.preempt) == ([], [])

    @invariant()
    def no_usable_slot_is_idle(self) -> None:
        if not self.stable or len(self.running) > 6:
            return
        allocations = list(self.running.values())
        for request in self.waiting.values():
            if not could_start(self.cluster, request, allocations):
                continue
            groups = limits(self.cluster, request.job).keys()
            rivals = [
                other
                for other in self.waiting.values()
                if other.job.pool == request.job.pool
                or groups & limits(self.cluster, other.job).keys()
            ]
            assert len(rivals) > 1, "it fits, and nothing else waits for its slots"
            if not all(other.job.single_agent for other in self.waiting.values()):
                continue  # :func:`delays` only covers trials on one agent
            earlier = [
                other for other in self.waiting.values() if self.turn(other) < self.turn(request)
            ]
            if self.starts_soon(other for other in earlier if other.job.pool == request.job.pool):
                continue
            if any(groups & limits(self.cluster, other.job).keys() for other in earlier):
                continue  # quota reservations may be larger than necessary
            for agent_id, free in free_slots(self.cluster, request, allocations).items():
                if free >= request.job.slots:
                    extra = on(self.cluster, agent_id, request)
                    assert any(delays(self.cluster, other, extra, allocations) for other in earlier)

    def starts_soon(self, candidates: Iterable[Request]) -> bool:
        """Return true if a job that waits for a quota starts after the stopping runs.

        Slots are reserved for it until then, even if the stopping runs would free enough: a
        trial that got them might be preempted immediately.
        """
        allocations = list(self.running.values())
        stay = [run for run in allocations if not run.stopping]
        return len(stay) < len(allocations) and any(
            limits(self.cluster, candidate.job)
            and not could_start(self.cluster, candidate, allocations)
            and could_start(self.cluster, candidate, stay)
            for candidate in candidates
        )


class WideClusterModel(ClusterModel):
    """Lifecycle with trials over several agents, and elastic ones."""

    make_job = staticmethod(wide_jobs)


# The same examples in every test run.
ClusterModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, derandomize=True
)
WideClusterModel.TestCase.settings = settings(ClusterModel.TestCase.settings, max_examples=30)
test_cluster_model = pytest.mark.slow(ClusterModel.TestCase)
test_cluster_model_with_wide_trials = pytest.mark.slow(WideClusterModel.TestCase)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=7), st.integers(0, 8), st.integers(1, 12))
def test_backfill_limit_is_maximal_without_delay(
    allocations: list[int], free: int, need: int
) -> None:
    def delayed(spare: int) -> bool:
        sums = [
            sum(some)
            for n in range(len(allocations) + 1)
            for some in itertools.combinations(allocations, n)
        ]
        return any(free + back >= need > free - spare + back for back in sums)

    spare = backfill_limit(free, allocations, need)
    assert not delayed(spare)
    assert spare == free or delayed(spare + 1)


@settings(max_examples=150, deadline=None)
@given(clusters, st.data())
def test_every_possible_trial_runs_eventually(cluster: Cluster, data: st.DataObject) -> None:
    """Small jobs keep arriving behind it in its pool; one run ends in each round."""
    large = Request(1, data.draw(jobs(1)))
    if not could_start(cluster, large, []):
        return
    numbers = itertools.count(2)
    allocations: list[Allocation] = []
    for _ in range(60):
        behind = [
            Request(
                100 * n,
                Job(
                    job_id=n,
                    slots=1,
                    position=1e6 + n,
                    pool=large.job.pool,
                    priority=large.job.priority,
                    groups=large.job.groups,
                    single_agent=True,
                    owner=large.job.owner,
                ),
            )
            for n in itertools.islice(numbers, 3)
        ]
        decision = schedule(cluster, [large, *behind], allocations)
        if any(start.request is large for start in decision.start):
            return
        allocations += [
            Allocation(next(numbers), item.request.job, item.slots) for item in decision.start
        ]
        if allocations:
            allocations.pop(data.draw(st.integers(0, len(allocations) - 1)))
    raise AssertionError(f"{large} never started: {decision.waiting[1]}")
