"""The scheduler against a model: what must hold in every round, whatever is asked.

A cluster lives through arrivals, ends, preemptions and rounds. The model knows nothing of how a
decision is made: it keeps its own books, and tries every order in which runs could end.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zerolab.scheduler import (
    AgentSlots,
    Allocation,
    Cluster,
    Decision,
    Job,
    Policy,
    Request,
    lendable,
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
clusters = st.builds(Cluster, agents, policies, quotas)
labels = st.lists(st.sampled_from(["label:x", "label:y"]), unique=True, max_size=2)


def jobs(job_id: int) -> st.SearchStrategy[Job]:
    return st.builds(
        lambda slots, position, pool, priority, weight, most, groups: Job(
            job_id=job_id,
            slots=slots,
            position=position,
            pool=pool,
            priority=priority,
            weight=weight,
            max_slots=most,
            groups=(f"pool:{pool}", *groups),
            single_agent=True,
        ),
        st.sampled_from([1, 1, 2, 3, 5]),
        st.floats(0, 9),
        st.sampled_from(POOLS),
        st.sampled_from([42, 42, 42, 1, 99]),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.sampled_from([None, None, 3, 6]),
        labels,
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
    """Jobs whose trials may lie over several agents, and begin with fewer slots than they want."""

    def widened(job: Job, shape: str) -> Job:
        slots, most, unit, fewer = WIDE[shape]
        wide = {"slots": slots, "max_agents": most, "unit": unit, "fewer": fewer}
        return replace(job, single_agent=False, **wide)  # type: ignore[arg-type]

    return st.builds(widened, jobs(job_id), st.sampled_from(sorted(WIDE)))


def charged(job: Job, group: str) -> bool:
    return group in {*job.groups, f"experiment:{job.job_id}"}


def limits(cluster: Cluster, job: Job) -> dict[str, int]:
    mine = {group: most for group, most in cluster.quotas.items() if charged(job, group)}
    own = {} if job.max_slots is None else {f"experiment:{job.job_id}": job.max_slots}
    return mine | own


def used(held: Iterable[Allocation], group: str) -> int:
    return sum(len(ids) for run in held if charged(run.job, group) for ids in run.slots.values())


def could_start(cluster: Cluster, request: Request, held: Sequence[Allocation]) -> bool:
    """Whether a trial has room, with these runs there; by the plainest possible count."""
    job = request.job
    free = list(free_slots(cluster, request, held).values())
    return any(
        has_room(job, size, free)
        and all(used(held, group) + size <= most for group, most in limits(cluster, job).items())
        for size in (job.slots, *job.fewer)
    )


def has_room(job: Job, size: int, free: Sequence[int]) -> bool:
    """Whether so many slots are free on one agent, or in whole ranks on as many as there may be."""
    if any(count >= size for count in free):
        return True
    most = 1 if job.single_agent else job.max_agents or len(free)
    shares = sorted((count - count % job.unit for count in free), reverse=True)
    return most > 1 and sum(shares[:most]) >= size


def free_slots(cluster: Cluster, request: Request, held: Sequence[Allocation]) -> dict[int, int]:
    taken = {(a, slot) for run in held for a, ids in run.slots.items() for slot in ids}
    return {
        agent.agent_id: sum((agent.agent_id, slot) not in taken for slot in agent.slots)
        for agent in cluster.agents
        if agent.pool == request.job.pool
        and not agent.closed
        and agent.agent_id not in request.excluded
    }


def ghosts(slots: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """As many slots of the same agents, that nobody has: :func:`delays` takes real ones away."""
    return {agent: tuple(range(1000, 1000 + len(ids))) for agent, ids in slots.items()}


def on(cluster: Cluster, agent_id: int, request: Request) -> Allocation:
    """Some slots of an agent, as a run of ``request`` would hold them: which ones is no matter."""
    return Allocation(999, request.job, ghosts({agent_id: range(request.job.slots)}))


def delays(cluster: Cluster, first: Request, extra: Allocation, held: Sequence[Allocation]) -> bool:
    """Whether some order of ends makes ``first`` wait longer because of ``extra``."""
    smaller = shrunk(cluster, extra, held)
    for number in range(len(held) + 1):
        for staying in itertools.combinations(held, number):
            if could_start(cluster, first, staying) and not could_start(
                smaller, first, [*staying, extra]
            ):
                return True
    return False


def shrunk(cluster: Cluster, extra: Allocation, held: Sequence[Allocation]) -> Cluster:
    """The cluster without as many slots as ``extra`` takes, of those that nobody holds."""
    taken = {(a, slot) for run in held for a, ids in run.slots.items() for slot in ids}
    smaller = []
    for agent in cluster.agents:
        free = [slot for slot in agent.slots if (agent.agent_id, slot) not in taken]
        gone = free[: len(extra.slots.get(agent.agent_id, ()))]
        left = tuple(slot for slot in agent.slots if slot not in gone)
        smaller.append(replace(agent, slots=left))
    return Cluster(smaller, cluster.policies, cluster.quotas)


def check_books(cluster: Cluster, before: Sequence[Allocation], decision: Decision) -> None:
    """No slot twice, all or none, nothing on closed agents, and no quota exceeded."""
    held = [*before]
    there = {agent.agent_id: agent for agent in cluster.agents}
    taken = Counter((a, slot) for run in before for a, ids in run.slots.items() for slot in ids)
    for start in decision.start:
        job = start.request.job
        assert sum(map(len, start.slots.values())) in {job.slots, *job.fewer}
        most = 1 if job.single_agent else job.max_agents
        assert len(start.slots) <= (most or len(there))
        assert len(start.slots) == 1 or all(
            len(ids) % job.unit == 0 for ids in start.slots.values()
        )
        for agent_id, ids in start.slots.items():
            agent = there[agent_id]
            assert agent.pool == job.pool
            assert not agent.closed
            assert agent_id not in start.request.excluded
            assert set(ids) <= set(agent.slots)
            taken.update((agent_id, slot) for slot in ids)
        held.append(Allocation(0, job, start.slots))
        for group, most in limits(cluster, job).items():
            assert used(held, group) <= most
    assert all(number == 1 for number in taken.values())


def turn_of(cluster: Cluster, request: Request, held: Sequence[Allocation]) -> tuple[float, ...]:
    """Where a request stands, by the documents: priority, then share, then place in the queue."""
    job = request.job
    policy = cluster.policies.get(job.pool, Policy.FAIR_SHARE)
    mine = sum(
        len(ids) for run in held if run.job.job_id == job.job_id for ids in run.slots.values()
    )
    return (
        42 if policy == Policy.FIFO else job.priority,
        mine / job.weight if policy == Policy.FAIR_SHARE else 0,
        job.position,
        request.trial_id,
    )


def check_order(
    cluster: Cluster, waiting: Sequence[Request], before: Sequence[Allocation], decision: Decision
) -> None:
    """Nobody starts while the first of all that wait has room, nor where that delays it.

    The second is looked at where the first waits for slots alone, and no quota counts for it.
    """
    held = [*before]
    left = Counter({one.trial_id: one.trials for one in waiting})
    left.subtract(start.request.trial_id for start in decision.start)
    stay = [one for one in waiting if left[one.trial_id] > 0 and could_start(cluster, one, [])]
    for start in decision.start:
        mine = Allocation(0, start.request.job, start.slots)
        first = min(stay, key=lambda one: turn_of(cluster, one, held), default=start.request)
        if turn_of(cluster, first, held) < turn_of(cluster, start.request, held):
            assert not could_start(cluster, first, held), (first, start)
            alone = first.job.single_agent and start.request.job.single_agent
            if alone and not limits(cluster, first.job) and len(held) <= 6:
                extra = Allocation(999, start.request.job, ghosts(start.slots))
                assert not delays(cluster, first, extra, held), (first, start)
        held.append(mine)


def check_preemption(
    cluster: Cluster, waiting: Sequence[Request], held: Sequence[Allocation], decision: Decision
) -> None:
    """Only for who is more important, never where priorities have no say, never to no end.

    The least important leave first, and of those the newest, where all are of one size.
    """
    runs = {run.run_id: run for run in held}
    for run_id in decision.preempt:
        victim = runs[run_id].job
        assert not runs[run_id].stopping
        assert cluster.policy(victim.pool) != Policy.FIFO
        assert any(
            one.job.priority < victim.priority and cluster.policy(one.job.pool) != Policy.FIFO
            for one in waiting
        )
    started = [Allocation(0, start.request.job, start.slots) for start in decision.start]
    staying = [run for run in held if not run.stopping and run.run_id not in decision.preempt]
    if decision.preempt:
        ready = [one for one in waiting if could_start(cluster, one, [*staying, *started])]
        assert ready, "runs were asked to leave, and nobody can start when they have"
    check_who_leaves(cluster, held, decision)
    check_who_waits(cluster, waiting, [*held, *started], decision)


def check_who_leaves(cluster: Cluster, held: Sequence[Allocation], decision: Decision) -> None:
    """Of runs that are alike but for priority and age, those leave that matter least."""
    alike = {
        (run.job.pool, tuple(run.slots), run.job.slots)
        for run in held
        if not run.stopping
    }  # fmt: skip
    if len(alike) != 1 or any(group != "pool" for run in held for group in quota_kinds(cluster)):
        return
    order = sorted(held, key=lambda run: (-run.job.priority, -run.run_id))
    asked = [run for run in order if run.run_id in decision.preempt]
    spared = [run for run in order if run.run_id not in decision.preempt and not run.stopping]
    if asked and spared and len({run.job.max_slots for run in held}) == 1:
        assert order.index(asked[-1]) < order.index(spared[0])


def quota_kinds(cluster: Cluster) -> set[str]:
    return {group.partition(":")[0] for group in cluster.quotas}


def check_who_waits(
    cluster: Cluster, waiting: Sequence[Request], held: Sequence[Allocation], decision: Decision
) -> None:
    """Who alone matters most in a pool without quotas waits for no run that matters less.

    Looked at where nothing has started in this round, and no job has a limit of its own.
    """
    if cluster.quotas or decision.start:
        return
    for pool in POOLS:
        there = [one for one in waiting if one.job.pool == pool and could_start(cluster, one, [])]
        if not there or cluster.policy(pool) == Policy.FIFO:
            continue
        most = min(one.job.priority for one in there)
        firsts = [one for one in there if one.job.priority == most]
        if len(firsts) > 1 or any(one.job.max_slots is not None for one in there):
            continue
        (first,) = firsts
        stay = [run for run in held if not run.stopping and run.run_id not in decision.preempt]
        if not could_start(cluster, first, stay):
            matter = [run for run in stay if run.job.priority <= most]
            assert not could_start(cluster, first, matter), (first, stay)


class Life(RuleBasedStateMachine):
    """Jobs come, run, are preempted, end; after each round the books are looked over."""

    make_job = staticmethod(jobs)

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster([])
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Allocation] = {}
        self.trial_of: dict[int, Request] = {}
        self.numbers = itertools.count(1)
        self.last = Decision()
        self.settled = False
        self.jobs_since = 0
        """How many jobs come before the machines change again."""

    @precondition(lambda self: not self.jobs_since)
    @rule(cluster=clusters)
    def machines_come_and_go(self, cluster: Cluster) -> None:
        there = {agent.agent_id: set(agent.slots) for agent in cluster.agents}
        for run_id, run in list(self.running.items()):
            if any(not set(ids) <= there.get(a, set()) for a, ids in run.slots.items()):
                self.end(run_id)
        self.cluster = cluster
        self.settled = False
        self.jobs_since = 6

    @rule(data=st.data(), trials=st.integers(1, 3), excluded=st.sampled_from([(), (), (1,)]))
    def jobs_come(self, data: st.DataObject, trials: int, excluded: tuple[int, ...]) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            number = next(self.numbers)
            job = data.draw(self.make_job(number))
            self.waiting[number] = Request(number * 100, job, trials, frozenset(excluded))
            self.jobs_since = max(self.jobs_since - 1, 0)
        self.settled = False

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_run_ends(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))))
        self.settled = False

    def end(self, run_id: int) -> None:
        run = self.running.pop(run_id)
        request = self.trial_of.pop(run_id)
        if run.stopping:  # it was preempted: its trial waits again
            mine = self.waiting.get(run.job.job_id)
            left = 1 if mine is None else mine.trials + 1
            self.waiting[run.job.job_id] = request._replace(trials=left)

    @rule()
    def a_round(self) -> None:
        """With quotas as many as it takes: what starts may leave others what was kept for one."""
        new: set[int] = set()
        for _ in range(5):
            there = set(self.running)
            self.one_round()
            assert not new & set(self.last.preempt), "it has only just started"
            new |= self.running.keys() - there
            if not (self.last.start and self.cluster.quotas):
                return
        raise AssertionError("one round after the other starts something")

    def one_round(self) -> None:
        waiting, held = list(self.waiting.values()), list(self.running.values())
        decision = schedule(self.cluster, waiting, held)
        assert schedule(self.cluster, reversed(waiting), held) == decision
        check_books(self.cluster, held, decision)
        check_order(self.cluster, waiting, held, decision)
        check_preemption(self.cluster, waiting, held, decision)
        started = Counter(start.request.job.job_id for start in decision.start)
        for start in decision.start:
            run_id = next(self.numbers)
            self.running[run_id] = Allocation(run_id, start.request.job, start.slots)
            self.trial_of[run_id] = start.request
        for job_id, number in started.items():
            request = self.waiting.pop(job_id)
            if request.trials > number:
                self.waiting[job_id] = request._replace(trials=request.trials - number)
        assert {one.trial_id for one in self.waiting.values()} == set(decision.waiting)
        assert all(decision.waiting.values())
        for run_id in decision.preempt:
            run = self.running[run_id]
            self.running[run_id] = Allocation(run_id, run.job, run.slots, stopping=True)
        self.last, self.settled = decision, True

    def turn(self, request: Request) -> tuple[float, ...]:
        """Where a request stands now, with what its job holds."""
        return turn_of(self.cluster, request, list(self.running.values()))

    @invariant()
    def after_a_round_nothing_is_left_to_do(self) -> None:
        if self.settled:
            held = list(self.running.values())
            again = schedule(self.cluster, self.waiting.values(), held)
            assert (again.start, again.preempt) == ([], [])

    @invariant()
    def no_slot_is_idle_that_a_trial_could_have_without_delaying_another(self) -> None:
        if not self.settled or len(self.running) > 6:
            return
        held = list(self.running.values())
        for request in self.waiting.values():
            if not could_start(self.cluster, request, held):
                continue
            mine = limits(self.cluster, request.job).keys()
            rivals = [
                one
                for one in self.waiting.values()
                if one.job.pool == request.job.pool or mine & limits(self.cluster, one.job).keys()
            ]
            assert len(rivals) > 1, "nothing else waits for its slots, and it has room"
            if not all(one.job.single_agent for one in self.waiting.values()):
                continue  # :func:`delays` counts for trials on one agent alone
            others = [one for one in self.waiting.values() if self.turn(one) < self.turn(request)]
            if self.soon_starts(one for one in others if one.job.pool == request.job.pool):
                continue
            if any(mine & limits(self.cluster, one.job).keys() for one in others):
                continue  # of a quota that both need, less may be lent than would do no harm
            for agent_id, free in free_slots(self.cluster, request, held).items():
                if free >= request.job.slots:
                    extra = on(self.cluster, agent_id, request)
                    assert any(delays(self.cluster, one, extra, held) for one in others)

    def soon_starts(self, others: Iterable[Request]) -> bool:
        """Whether one that waits for a quota starts when those have left that were asked to.

        It would start on slots that are free by then, so some are kept for it meanwhile, also where
        those that leave would leave it enough: a trial that got them might have to leave at once.
        """
        held = list(self.running.values())
        stay = [run for run in held if not run.stopping]
        return len(stay) < len(held) and any(
            limits(self.cluster, one.job)
            and not could_start(self.cluster, one, held)
            and could_start(self.cluster, one, stay)
            for one in others
        )


class WideLife(Life):
    """The same with trials over several agents, and elastic ones."""

    make_job = staticmethod(wide_jobs)


# The same lives in every run.
Life.TestCase.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, derandomize=True
)
WideLife.TestCase.settings = settings(Life.TestCase.settings, max_examples=30)
test_the_life_of_a_cluster = pytest.mark.slow(Life.TestCase)
test_the_life_of_a_cluster_with_wide_trials = pytest.mark.slow(WideLife.TestCase)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=7), st.integers(0, 8), st.integers(1, 12))
def test_what_is_lent_is_the_most_that_delays_nobody(held: list[int], free: int, need: int) -> None:
    def delayed(lent: int) -> bool:
        sums = [sum(some) for n in range(len(held) + 1) for some in itertools.combinations(held, n)]
        return any(free + back >= need > free - lent + back for back in sums)

    lent = lendable(free, held, need)
    assert not delayed(lent)
    assert lent == free or delayed(lent + 1)


@settings(max_examples=150, deadline=None)
@given(clusters, st.data())
def test_every_trial_that_may_run_at_all_runs_in_the_end(
    cluster: Cluster, data: st.DataObject
) -> None:
    """Small jobs keep coming behind it and in its pool; each run ends when the next one would."""
    large = Request(1, data.draw(jobs(1)))
    if not could_start(cluster, large, []):
        return
    numbers = itertools.count(2)
    held: list[Allocation] = []
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
                ),
            )
            for n in itertools.islice(numbers, 3)
        ]
        decision = schedule(cluster, [large, *behind], held)
        if any(start.request is large for start in decision.start):
            return
        held += [Allocation(next(numbers), one.request.job, one.slots) for one in decision.start]
        if held:
            held.pop(data.draw(st.integers(0, len(held) - 1)))
    raise AssertionError(f"{large} never started: {decision.waiting[1]}")
