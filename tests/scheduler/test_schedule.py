"""The scheduler, case by case; ``test_model.py`` holds its rules against a model."""

import pytest

from zerolab.scheduler import (
    AgentSlots,
    Allocation,
    Cluster,
    Decision,
    Job,
    Policy,
    Request,
    Start,
    lendable,
    place,
    schedule,
)


def job(job_id: int, slots: int = 1, **more: object) -> Job:
    values: dict[str, object] = {"position": float(job_id), "single_agent": True, **more}
    return Job(job_id=job_id, slots=slots, **values)  # type: ignore[arg-type]


def request(job_id: int, slots: int = 1, trials: int = 1, **more: object) -> Request:
    """One request for each job, whose trials are numbered from a hundred times its id."""
    return Request(100 * job_id, job(job_id, slots, **more), trials)


def agent(agent_id: int, slots: int, kind: str = "cpu", **more: str) -> AgentSlots:
    return AgentSlots(agent_id, tuple(range(slots)), kind, name=f"a{agent_id}", **more)


def ran(starts: list[Start]) -> list[Allocation]:
    """What was started, as it runs a moment later."""
    return [Allocation(n, one.request.job, one.slots) for n, one in enumerate(starts, 1)]


def started(decision: Decision) -> list[int]:
    return [start.request.job.job_id for start in decision.start]


def reasons(decision: Decision) -> dict[int, str]:
    return {trial // 100: told for trial, told in decision.waiting.items()}


def running(cluster: Cluster, *requests: Request) -> list[Allocation]:
    decision = schedule(cluster, requests, [])
    assert not decision.waiting
    return ran(decision.start)


def of(*agents: AgentSlots, **more: object) -> Cluster:
    return Cluster(agents, **more)  # type: ignore[arg-type]


# -- whose turn it is ------------------------------------------------------------------------


def test_the_first_asked_runs_first() -> None:
    decision = schedule(of(agent(1, 2)), [request(2), request(1), request(3)], [])
    assert started(decision) == [1, 2]
    assert decision.preempt == []


def test_jobs_share_slots_by_weight() -> None:
    waiting = [request(1, trials=6), request(2, trials=6, weight=2.0)]
    decision = schedule(of(agent(1, 6)), waiting, [])
    assert (started(decision).count(1), started(decision).count(2)) == (2, 4)


def test_a_pool_by_priority_serves_one_job_after_the_other() -> None:
    waiting = [request(1, trials=4), request(2, trials=4, weight=9.0)]
    cluster = of(agent(1, 6), policies={"default": Policy.PRIORITY})
    assert started(schedule(cluster, waiting, [])) == [1, 1, 1, 1, 2, 2]


def test_in_a_fifo_pool_priority_has_no_say() -> None:
    waiting = [request(1, priority=99), request(2, priority=1)]
    fifo = of(agent(1, 1), policies={"default": Policy.FIFO})
    decision = schedule(fifo, waiting, [])
    assert started(decision) == [1]
    assert schedule(fifo, [waiting[1]], ran(decision.start)).preempt == []
    assert started(schedule(of(agent(1, 1)), waiting, [])) == [2]


def test_a_job_that_was_moved_starts_where_it_stands() -> None:
    waiting = [request(1), request(2, position=0.5)]
    assert started(schedule(of(agent(1, 1)), waiting, [])) == [2]


def test_a_job_runs_on_the_agents_of_its_pool_alone() -> None:
    cluster = of(agent(1, 1), agent(2, 4, pool="big"))
    waiting = [request(1, trials=2), request(2, 2, pool="big")]
    decision = schedule(cluster, waiting, [])
    assert [(s.request.job.job_id, *s.slots) for s in decision.start] == [(1, 1), (2, 2)]


def test_pools_do_not_wait_for_each_other() -> None:
    cluster = of(agent(1, 2), agent(2, 2, pool="other"))
    held = running(cluster, request(1, 2))
    decision = schedule(cluster, [request(2, 2), request(3, 2, pool="other")], held)
    assert started(decision) == [3]


# -- preemption ------------------------------------------------------------------------------


def test_a_higher_priority_preempts_the_newest_of_the_lowest_and_no_more_than_needed() -> None:
    cluster = of(agent(1, 4))
    held = running(
        cluster, request(1, priority=50), request(2, priority=90), request(3, 2, priority=90)
    )
    important = request(9, 2, priority=10)
    decision = schedule(cluster, [important], held)
    assert decision.preempt == [3]
    assert reasons(decision)[9].endswith("other runs are asked to make room")
    leaving = [Allocation(r.run_id, r.job, r.slots, stopping=r.run_id == 3) for r in held]
    assert schedule(cluster, [important], leaving) == Decision()
    assert started(schedule(cluster, [important], held[:2])) == [9]


def test_nothing_is_preempted_where_that_would_not_make_room() -> None:
    cluster = of(agent(1, 2))
    held = running(cluster, request(1, priority=10), request(2, priority=90))
    assert schedule(cluster, [request(3, 2, priority=20)], held) == Decision()


def test_equal_priority_preempts_nobody() -> None:
    cluster = of(agent(1, 1))
    assert schedule(cluster, [request(2)], running(cluster, request(1))) == Decision()


def test_nobody_is_preempted_on_an_agent_that_the_trial_cannot_use() -> None:
    cluster = of(agent(1, 2), agent(2, 2, pool="other"))
    held = running(cluster, request(1, 2, priority=20), request(2, 2, priority=99, pool="other"))
    assert schedule(cluster, [request(3, 2, priority=10)], held).preempt == [1]


def test_a_full_quota_is_made_room_in_for_a_higher_priority() -> None:
    cluster = of(agent(1, 4), quotas={"label:x": 2})
    x: dict[str, object] = {"groups": ("label:x",)}
    held = running(cluster, request(1, 2, priority=90, **x), request(2, priority=90))
    assert schedule(cluster, [request(3, priority=10, **x)], held).preempt == [1]


def test_a_trial_over_several_agents_has_as_many_leave_as_let_it_lie_on_those_it_may_take() -> None:
    cluster = of(agent(1, 2), agent(2, 2), agent(3, 2))
    spread: dict[str, object] = {"single_agent": False, "max_agents": 2, "priority": 10}
    held = running(cluster, *(request(number, priority=90) for number in range(1, 7)))
    where = {run.run_id: next(iter(run.slots)) for run in held}
    # One of each agent ends: three slots are free, but on three agents.
    left = [run for run in held if run.run_id in {1, 3, 5}]
    assert sorted(where[run.run_id] for run in left) == [1, 2, 3]
    important = request(9, 3, **spread)
    decision = schedule(cluster, [important], left)
    assert len(decision.preempt) == 1
    assert decision.waiting[900].startswith("it needs 3 slots on at most 2 machines, of which 2")
    rest = [run for run in left if run.run_id not in decision.preempt]
    (start,) = schedule(cluster, [important], rest).start
    assert sorted(map(len, start.slots.values())) == [1, 2]
    # Where the machines that it may take are too small, nobody leaves.
    assert schedule(cluster, [request(9, 5, **spread)], held).preempt == []


def test_an_important_trial_has_one_over_several_agents_leave_as_a_whole() -> None:
    cluster = of(agent(1, 2), agent(2, 2))
    held = running(cluster, request(1, 4, single_agent=False, max_agents=2, priority=90))
    assert {*held[0].slots} == {1, 2}
    decision = schedule(cluster, [request(2, 1, priority=10)], held)
    assert decision.preempt == [1]
    equal = request(3, 4, single_agent=False, max_agents=2, priority=90)
    assert schedule(cluster, [equal], held).preempt == []


def test_the_slots_of_a_rank_lie_on_one_agent() -> None:
    cluster = of(agent(1, 3), agent(2, 3))
    spread: dict[str, object] = {"single_agent": False, "max_agents": 2, "unit": 2}
    (start,) = schedule(cluster, [request(1, 4, **spread)], []).start
    assert {one: len(ids) for one, ids in start.slots.items()} == {1: 2, 2: 2}
    assert schedule(cluster, [request(1, 6, **spread)], []).impossible == [100]
    held = running(cluster, request(1, priority=90), request(2, priority=90))
    assert schedule(cluster, [request(9, 4, priority=10, **spread)], held).preempt == [2]


# -- elastic ---------------------------------------------------------------------------------


def elastic(job_id: int = 1, **more: object) -> Request:
    return request(
        job_id, 4, **{"single_agent": False, "max_agents": 2, "fewer": (2, 1), **more}
    )  # fmt: skip


def test_an_elastic_trial_takes_all_its_slots_and_the_most_that_are_free_where_it_cannot() -> None:
    def slots(cluster: Cluster, *held: Allocation) -> int:
        (start,) = schedule(cluster, [elastic()], held).start
        assert start.request.job == elastic().job
        return sum(map(len, start.slots.values()))

    assert slots(of(agent(1, 2), agent(2, 2))) == 4
    assert slots(of(agent(1, 2))) == 2  # its other agent is gone
    assert slots(of(agent(1, 3))) == 2  # 3 do not divide its batch
    assert slots(of(agent(1, 1))) == 1
    both = of(agent(1, 2), agent(2, 2))
    assert slots(both, *running(both, request(2, 2))) == 2  # its slots were given to another
    assert slots(of(agent(1, 4), quotas={"pool:x": 2}), *()) == 4
    bounded = of(agent(1, 4), quotas={"label:x": 2})
    (start,) = schedule(bounded, [elastic(groups=("label:x",))], []).start
    assert sum(map(len, start.slots.values())) == 2


def test_an_elastic_trial_without_a_slot_waits_for_the_most_that_there_will_be() -> None:
    cluster = of(agent(1, 2))
    held = running(cluster, request(2, 2))
    decision = schedule(cluster, [elastic(fewer=(2,)), request(3, 1)], held)
    assert decision.waiting[100].startswith("it needs 2 slots")
    assert decision.impossible == []
    nothing = schedule(of(agent(1, 1)), [elastic(fewer=(2,))], [])
    assert nothing.impossible == [100]


def test_an_elastic_trial_takes_nothing_that_is_kept_for_one_that_goes_first() -> None:
    cluster = of(agent(1, 3))
    held = running(cluster, request(2, 2))
    first = request(3, 3, priority=10)
    decision = schedule(cluster, [first, elastic(fewer=(2, 1))], held)
    assert started(decision) == []
    assert decision.waiting[100].startswith("experiment 3 goes first")


# -- backfill --------------------------------------------------------------------------------


def test_what_may_be_lent_delays_the_one_who_waits_in_no_order_of_ends() -> None:
    assert lendable(1, [3], 2) == 1  # 3 come back at once: 4 are free, 2 are needed
    assert lendable(1, [1, 2], 2) == 0  # if the 1 comes back first, both are needed
    assert lendable(2, [2, 2], 4) == 0
    assert lendable(3, [4], 8) == 3  # never enough here
    assert lendable(3, [], 2) == 1
    assert lendable(0, [1, 1], 1) == 0


def test_a_large_trial_is_not_starved_by_small_ones_behind_it() -> None:
    cluster = of(agent(1, 4))
    held = running(cluster, request(1, 2))
    assert schedule(cluster, [request(2, 4), request(3, 1)], held) == Decision()


def test_a_small_trial_starts_before_a_large_one_that_it_does_not_delay() -> None:
    cluster = of(agent(1, 4))
    held = running(cluster, request(1, 3))
    decision = schedule(cluster, [request(2, 2), request(3, 1, trials=2)], held)
    assert [(start.request.job.job_id, start.before) for start in decision.start] == [(3, 2)]
    assert reasons(decision) == {
        2: "it needs 2 slots on one machine, of which 1 is free",
        3: "experiment 2 goes first",
    }


def test_an_agent_that_is_too_small_for_the_first_is_free_for_those_behind_it() -> None:
    cluster = of(agent(1, 4), agent(2, 2))
    held = running(cluster, request(1, 3))
    decision = schedule(cluster, [request(2, 4), request(3, 2), request(4)], held)
    assert started(decision) == [3]
    told = "experiment 2 goes first, and could have to wait longer if this one started now"
    assert reasons(decision)[4] == told


def test_a_trial_that_can_never_fit_blocks_nobody() -> None:
    decision = schedule(of(agent(1, 2)), [request(1, 3), request(2, 2)], [])
    assert decision.impossible == [100]
    assert started(decision) == [2]


# -- quotas ----------------------------------------------------------------------------------


def test_a_job_holds_no_more_than_its_max_slots() -> None:
    waiting = [request(1, 2, trials=3, max_slots=4), request(2, 2)]
    decision = schedule(of(agent(1, 8)), waiting, [])
    assert sorted(started(decision)) == [1, 1, 2]
    told = "its experiment holds 4 of the 4 slots of resources.max_slots"
    assert reasons(decision) == {1: told}


@pytest.mark.parametrize("group", ["label:x", "user:ann"])  # any kind of group will do
def test_the_jobs_of_a_group_hold_no_more_than_its_quota(group: str) -> None:
    waiting = [
        request(1, 2, groups=(group, "pool:default")),
        request(2, 2, groups=(group, "pool:default")),
        request(3, 2, groups=("pool:default",)),
        request(4, 2, groups=("pool:default",)),
    ]
    cluster = of(agent(1, 9), quotas={group: 3, "pool:default": 5})
    decision = schedule(cluster, waiting, [])
    assert started(decision) == [1, 3]
    assert reasons(decision) == {
        2: f"it needs 2 slots on one machine, and 2 of the 3 of quota {group} are held",
        4: "experiment 2 goes first: slots of quota pool:default are kept for it",
    }


def test_a_slot_of_a_hostfile_belongs_to_one_trial_at_a_time() -> None:
    cluster = of(agent(1, 4))
    first = request(1, trials=2, groups=("host:worker-1:0", "host:me@worker-2:0"))
    other = request(2, groups=("host:worker-1:1",))
    shared = request(3, groups=("host:me@worker-2:0", "host:me@worker-2:1"))
    decision = schedule(cluster, [first, other, shared], [])
    assert started(decision) == [1, 2]
    held = "slot 0 of me@worker-2 of its hostfile is held by another trial"
    assert reasons(decision)[1] == "slot 0 of worker-1 of its hostfile is held by another trial"
    assert reasons(schedule(cluster, [shared], ran(decision.start))) == {3: held}
    assert started(schedule(cluster, [shared], ran(decision.start)[1:])) == [3]
    urgent = request(4, priority=1, groups=("host:worker-1:1",))
    assert schedule(cluster, [urgent], ran(decision.start)).preempt == [2]


def test_a_large_trial_is_not_starved_in_its_quota_by_small_ones_behind_it() -> None:
    cluster = of(agent(1, 8), quotas={"label:x": 4})
    x = {"groups": ("label:x",)}
    held = running(cluster, request(1, 2, **x))
    decision = schedule(cluster, [request(2, 3, **x), request(3, 1, **x), request(4, 1)], held)
    assert started(decision) == [3, 4]  # 1 of the quota is left over when job 1 has ended
    decision = schedule(cluster, [request(2, 4, **x), request(3, 1, **x)], held)
    assert started(decision) == []


def test_a_quota_that_is_too_small_is_named_with_its_remedy() -> None:
    cluster = of(agent(1, 8), quotas={"label:x": 1})
    decision = schedule(cluster, [request(1, 2, groups=("label:x",)), request(2)], [])
    assert decision.impossible == [100]
    assert "`zerolab quota set label:x 2`" in reasons(decision)[1]
    assert started(decision) == [2]


# -- placement -------------------------------------------------------------------------------


def test_a_trial_goes_to_the_agent_that_it_fills_best() -> None:
    machines = [agent(1, 4), agent(2, 2)]
    assert place(2, machines, {1: [0, 1, 2, 3], 2: [0, 1]}) == {2: (0, 1)}


def test_a_trial_is_spread_over_agents_only_when_no_one_holds_it() -> None:
    machines = [agent(1, 2), agent(2, 2), agent(3, 3)]
    free = {1: [0, 1], 2: [0, 1], 3: [0, 1, 2]}
    assert place(3, machines, free) == {3: (0, 1, 2)}
    assert place(4, machines, free) == {3: (0, 1, 2), 1: (0,)}
    assert place(4, machines, free, single_agent=True) is None


def test_gpus_come_before_cpu_slots_and_are_not_mixed_with_them() -> None:
    machines = [agent(1, 2), agent(2, 1, "cuda")]
    free = {1: [0, 1], 2: [0]}
    assert place(1, machines, free) == {2: (0,)}
    assert place(2, machines, free) == {1: (0, 1)}
    assert place(3, machines, free) is None


def test_nothing_starts_on_a_closed_agent_or_on_an_agent_that_is_ruled_out() -> None:
    cluster = of(agent(1, 2, closed="is disabled"), agent(2, 2))
    only_first = Request(100, job(1), 1, frozenset({2}))
    decision = schedule(cluster, [only_first, request(2)], [])
    assert [(s.request.job.job_id, *s.slots) for s in decision.start] == [(2, 2)]
    assert reasons(decision) == {1: "it needs 1 slot, and agent a1 is disabled"}


def test_slots_are_kept_for_who_starts_when_those_of_its_quota_have_left() -> None:
    mine = job(1, groups=("label:x",))
    running = [Allocation(1, mine, {1: (0,)})]
    first = Request(2, job(2, slots=2, priority=1, groups=("label:x",)))
    behind = Request(3, job(3))
    cluster = Cluster([agent(1, 2)], {}, {"label:x": 2})
    decision = schedule(cluster, [first, behind], running)
    # Else it would start, and be asked to leave in the next round.
    assert (decision.start, decision.preempt) == ([], [1])
    assert decision.waiting[3].startswith("experiment 2 goes first")


# -- reasons ---------------------------------------------------------------------------------


def test_the_reason_for_a_wait_names_what_is_missing() -> None:
    def told(cluster: Cluster, wanted: Request) -> str:
        return schedule(cluster, [wanted], []).waiting[wanted.trial_id]

    many = request(1, 8)
    assert "no agent is there" in told(of(), many)
    missing = told(of(agent(1, 2), agent(2, 4)), many)
    assert missing.startswith("it needs 8 slots on one machine, and there are at most 4: it cannot")
    assert "resources.slots_per_trial to 4 or less" in missing
    assert "at most 6" in told(of(agent(1, 2), agent(2, 4)), request(1, 8, single_agent=False))
    ruled_out = Request(1, job(1), 1, frozenset({1}))
    assert told(of(agent(1, 8)), ruled_out) == "its log policies rule out every agent that is there"
    elsewhere = told(of(agent(1, 8, pool="big")), request(1))
    assert elsewhere.startswith("no agent of pool default is there: start one with")
    assert elsewhere.endswith("agents are in big")
    partly = AgentSlots(1, (0,), name="a1", disabled=1)
    assert "at most 1 (1 of agent a1 is disabled)" in told(of(partly), request(1, 2))


def test_the_reason_for_a_wait_names_who_goes_first() -> None:
    cluster = of(agent(1, 3))
    held = running(cluster, request(1, 2, max_slots=2))
    waiting = [
        request(2, 3),
        Request(201, request(2, 3).job, 1, frozenset({9})),
        request(4, 2),
        request(5, 1),
        request(1, 1, max_slots=2),
    ]
    decision = schedule(cluster, waiting, held)
    first = "experiment 2 goes first"
    assert decision.waiting == {
        100: "its experiment holds 2 of the 2 slots of resources.max_slots",
        200: "it needs 3 slots on one machine, of which 1 is free",
        201: "an earlier trial of its experiment goes first",
        400: first,
        500: f"{first}, and could have to wait longer if this one started now",
    }
