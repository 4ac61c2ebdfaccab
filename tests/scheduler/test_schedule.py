"""Scheduling cases; ``test_model.py`` checks the rules against a model."""

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
    backfill_limit,
    place,
    schedule,
)


def job(job_id: int, slots: int = 1, **more: object) -> Job:
    values: dict[str, object] = {"position": float(job_id), "single_agent": True, **more}
    return Job(job_id=job_id, slots=slots, **values)  # type: ignore[arg-type]


def request(job_id: int, slots: int = 1, trials: int = 1, **more: object) -> Request:
    """Return one request per job; its trials are numbered from 100 times the job id."""
    return Request(100 * job_id, job(job_id, slots, **more), trials)


def agent(agent_id: int, slots: int, kind: str = "cpu", **more: str) -> AgentSlots:
    return AgentSlots(agent_id, tuple(range(slots)), kind, name=f"a{agent_id}", **more)


def as_running(starts: list[Start]) -> list[Allocation]:
    """Return the started trials as running allocations."""
    return [Allocation(n, start.request.job, start.slots) for n, start in enumerate(starts, 1)]


def started(decision: Decision) -> list[int]:
    return [start.request.job.job_id for start in decision.start]


def reasons(decision: Decision) -> dict[int, str]:
    return {trial // 100: reason for trial, reason in decision.waiting.items()}


def running(cluster: Cluster, *requests: Request) -> list[Allocation]:
    decision = schedule(cluster, requests, [])
    assert not decision.waiting
    return as_running(decision.start)


def of(*agents: AgentSlots, **more: object) -> Cluster:
    return Cluster(agents, **more)  # type: ignore[arg-type]


# -- order of the queue  ------------------------------------------------------------------------


def test_jobs_start_in_queue_order() -> None:
    decision = schedule(of(agent(1, 2)), [request(2), request(1), request(3)], [])
    assert started(decision) == [1, 2]
    assert decision.preempt == []


def test_jobs_share_slots_by_weight() -> None:
    waiting = [request(1, trials=6), request(2, trials=6, weight=2.0)]
    decision = schedule(of(agent(1, 6)), waiting, [])
    assert (started(decision).count(1), started(decision).count(2)) == (2, 4)


def test_priority_pool_serves_jobs_in_sequence() -> None:
    waiting = [request(1, trials=4), request(2, trials=4, weight=9.0)]
    cluster = of(agent(1, 6), policies={"default": Policy.PRIORITY})
    assert started(schedule(cluster, waiting, [])) == [1, 1, 1, 1, 2, 2]


def test_fifo_pool_ignores_priority() -> None:
    waiting = [request(1, priority=99), request(2, priority=1)]
    fifo = of(agent(1, 1), policies={"default": Policy.FIFO})
    decision = schedule(fifo, waiting, [])
    assert started(decision) == [1]
    assert schedule(fifo, [waiting[1]], as_running(decision.start)).preempt == []
    assert started(schedule(of(agent(1, 1)), waiting, [])) == [2]


def test_moved_job_starts_by_position() -> None:
    waiting = [request(1), request(2, position=0.5)]
    assert started(schedule(of(agent(1, 1)), waiting, [])) == [2]


def test_job_runs_only_in_its_pool() -> None:
    cluster = of(agent(1, 1), agent(2, 4, pool="big"))
    waiting = [request(1, trials=2), request(2, 2, pool="big")]
    decision = schedule(cluster, waiting, [])
    assert [(s.request.job.job_id, *s.slots) for s in decision.start] == [(1, 1), (2, 2)]


def test_pools_are_independent() -> None:
    cluster = of(agent(1, 2), agent(2, 2, pool="other"))
    allocations = running(cluster, request(1, 2))
    decision = schedule(cluster, [request(2, 2), request(3, 2, pool="other")], allocations)
    assert started(decision) == [3]


# -- preemption ------------------------------------------------------------------------------


def test_preempts_newest_of_lowest_priority() -> None:
    cluster = of(agent(1, 4))
    allocations = running(
        cluster, request(1, priority=50), request(2, priority=90), request(3, 2, priority=90)
    )
    important = request(9, 2, priority=10)
    decision = schedule(cluster, [important], allocations)
    assert decision.preempt == [3]
    assert reasons(decision)[9].endswith("other runs save a checkpoint and free their slots")
    leaving = [Allocation(r.run_id, r.job, r.slots, stopping=r.run_id == 3) for r in allocations]
    assert schedule(cluster, [important], leaving) == Decision()
    assert started(schedule(cluster, [important], allocations[:2])) == [9]


def test_no_preemption_if_it_would_not_help() -> None:
    cluster = of(agent(1, 2))
    allocations = running(cluster, request(1, priority=10), request(2, priority=90))
    assert schedule(cluster, [request(3, 2, priority=20)], allocations) == Decision()


def test_equal_priority_does_not_preempt() -> None:
    cluster = of(agent(1, 1))
    assert schedule(cluster, [request(2)], running(cluster, request(1))) == Decision()


def test_no_preemption_on_unusable_agents() -> None:
    cluster = of(agent(1, 2), agent(2, 2, pool="other"))
    allocations = running(
        cluster, request(1, 2, priority=20), request(2, 2, priority=99, pool="other")
    )
    assert schedule(cluster, [request(3, 2, priority=10)], allocations).preempt == [1]


def test_preempts_within_full_quota() -> None:
    cluster = of(agent(1, 4), quotas={"label:x": 2})
    x: dict[str, object] = {"groups": ("label:x",)}
    allocations = running(cluster, request(1, 2, priority=90, **x), request(2, priority=90))
    assert schedule(cluster, [request(3, priority=10, **x)], allocations).preempt == [1]


def test_multi_agent_trial_preempts_as_needed() -> None:
    cluster = of(agent(1, 2), agent(2, 2), agent(3, 2))
    spread: dict[str, object] = {"single_agent": False, "max_agents": 2, "priority": 10}
    allocations = running(cluster, *(request(number, priority=90) for number in range(1, 7)))
    agent_of = {run.run_id: next(iter(run.slots)) for run in allocations}
    # One of each agent ends: three slots are free, but on three agents.
    remaining = [run for run in allocations if run.run_id in {1, 3, 5}]
    assert sorted(agent_of[run.run_id] for run in remaining) == [1, 2, 3]
    important = request(9, 3, **spread)
    decision = schedule(cluster, [important], remaining)
    assert len(decision.preempt) == 1
    assert decision.waiting[900].startswith("it needs 3 slots on at most 2 machines, of which 2")
    unpreempted = [run for run in remaining if run.run_id not in decision.preempt]
    (start,) = schedule(cluster, [important], unpreempted).start
    assert sorted(map(len, start.slots.values())) == [1, 2]
    # If the allowed machines are too small, nothing is preempted.
    assert schedule(cluster, [request(9, 5, **spread)], allocations).preempt == []


def test_multi_agent_run_is_preempted_completely() -> None:
    cluster = of(agent(1, 2), agent(2, 2))
    allocations = running(cluster, request(1, 4, single_agent=False, max_agents=2, priority=90))
    assert {*allocations[0].slots} == {1, 2}
    decision = schedule(cluster, [request(2, 1, priority=10)], allocations)
    assert decision.preempt == [1]
    equal = request(3, 4, single_agent=False, max_agents=2, priority=90)
    assert schedule(cluster, [equal], allocations).preempt == []


def test_slots_of_a_rank_are_on_one_agent() -> None:
    cluster = of(agent(1, 3), agent(2, 3))
    spread: dict[str, object] = {"single_agent": False, "max_agents": 2, "unit": 2}
    (start,) = schedule(cluster, [request(1, 4, **spread)], []).start
    assert {agent_id: len(ids) for agent_id, ids in start.slots.items()} == {1: 2, 2: 2}
    assert schedule(cluster, [request(1, 6, **spread)], []).impossible == [100]
    allocations = running(cluster, request(1, priority=90), request(2, priority=90))
    assert schedule(cluster, [request(9, 4, priority=10, **spread)], allocations).preempt == [2]


# -- elastic ---------------------------------------------------------------------------------


def elastic(job_id: int = 1, **more: object) -> Request:
    return request(
        job_id, 4, **{"single_agent": False, "max_agents": 2, "fewer": (2, 1), **more}
    )  # fmt: skip


def test_elastic_trial_takes_largest_free_size() -> None:
    def slots(cluster: Cluster, *allocations: Allocation) -> int:
        (start,) = schedule(cluster, [elastic()], allocations).start
        assert start.request.job == elastic().job
        return sum(map(len, start.slots.values()))

    assert slots(of(agent(1, 2), agent(2, 2))) == 4
    assert slots(of(agent(1, 2))) == 2  # its other agent is disconnected
    assert slots(of(agent(1, 3))) == 2  # 3 do not divide its batch
    assert slots(of(agent(1, 1))) == 1
    both = of(agent(1, 2), agent(2, 2))
    assert slots(both, *running(both, request(2, 2))) == 2  # another job holds its slots
    assert slots(of(agent(1, 4), quotas={"pool:x": 2}), *()) == 4
    bounded = of(agent(1, 4), quotas={"label:x": 2})
    (start,) = schedule(bounded, [elastic(groups=("label:x",))], []).start
    assert sum(map(len, start.slots.values())) == 2


def test_elastic_trial_waits_for_largest_possible_size() -> None:
    cluster = of(agent(1, 2))
    allocations = running(cluster, request(2, 2))
    decision = schedule(cluster, [elastic(fewer=(2,)), request(3, 1)], allocations)
    assert decision.waiting[100].startswith("it needs 2 slots")
    assert decision.impossible == []
    impossible = schedule(of(agent(1, 1)), [elastic(fewer=(2,))], [])
    assert impossible.impossible == [100]


def test_elastic_trial_respects_reserved_slots() -> None:
    cluster = of(agent(1, 3))
    allocations = running(cluster, request(2, 2))
    first = request(3, 3, priority=10)
    decision = schedule(cluster, [first, elastic(fewer=(2, 1))], allocations)
    assert started(decision) == []
    assert decision.waiting[100].startswith("experiment 3 goes first")


# -- backfill --------------------------------------------------------------------------------


def test_backfill_limit_examples() -> None:
    assert backfill_limit(1, [3], 2) == 1  # 3 come back at once: 4 are free, 2 are needed
    assert backfill_limit(1, [1, 2], 2) == 0  # if the 1 comes back first, both are needed
    assert backfill_limit(2, [2, 2], 4) == 0
    assert backfill_limit(3, [4], 8) == 3  # never enough here
    assert backfill_limit(3, [], 2) == 1
    assert backfill_limit(0, [1, 1], 1) == 0


def test_large_trial_is_not_starved() -> None:
    cluster = of(agent(1, 4))
    allocations = running(cluster, request(1, 2))
    assert schedule(cluster, [request(2, 4), request(3, 1)], allocations) == Decision()


def test_small_trial_backfills_without_delay() -> None:
    cluster = of(agent(1, 4))
    allocations = running(cluster, request(1, 3))
    decision = schedule(cluster, [request(2, 2), request(3, 1, trials=2)], allocations)
    assert [(start.request.job.job_id, start.before) for start in decision.start] == [(3, 2)]
    assert reasons(decision) == {
        2: "it needs 2 slots on one machine, of which 1 is free",
        3: "experiment 2 goes first",
    }


def test_agent_too_small_for_first_is_backfilled() -> None:
    cluster = of(agent(1, 4), agent(2, 2))
    allocations = running(cluster, request(1, 3))
    decision = schedule(cluster, [request(2, 4), request(3, 2), request(4)], allocations)
    assert started(decision) == [3]
    reason = "experiment 2 goes first, and could wait longer if this job started now"
    assert reasons(decision)[4] == reason


def test_impossible_trial_blocks_no_other() -> None:
    decision = schedule(of(agent(1, 2)), [request(1, 3), request(2, 2)], [])
    assert decision.impossible == [100]
    assert started(decision) == [2]


# -- quotas ----------------------------------------------------------------------------------


def test_max_slots_limits_a_job() -> None:
    waiting = [request(1, 2, trials=3, max_slots=4), request(2, 2)]
    decision = schedule(of(agent(1, 8)), waiting, [])
    assert sorted(started(decision)) == [1, 1, 2]
    reason = "its experiment holds 4 of the 4 slots of resources.max_slots"
    assert reasons(decision) == {1: reason}


@pytest.mark.parametrize("group", ["label:x", "user:ann"])  # any kind of group will do
def test_quota_limits_a_group(group: str) -> None:
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
        4: "experiment 2 goes first: slots of quota pool:default are reserved for it",
    }


def test_hostfile_slot_is_exclusive() -> None:
    cluster = of(agent(1, 4))
    first = request(1, trials=2, groups=("host:worker-1:0", "host:me@worker-2:0"))
    other = request(2, groups=("host:worker-1:1",))
    shared = request(3, groups=("host:me@worker-2:0", "host:me@worker-2:1"))
    decision = schedule(cluster, [first, other, shared], [])
    assert started(decision) == [1, 2]
    allocations = "slot 0 of me@worker-2 of its hostfile is held by another trial"
    assert reasons(decision)[1] == "slot 0 of worker-1 of its hostfile is held by another trial"
    assert reasons(schedule(cluster, [shared], as_running(decision.start))) == {3: allocations}
    assert started(schedule(cluster, [shared], as_running(decision.start)[1:])) == [3]
    urgent = request(4, priority=1, groups=("host:worker-1:1",))
    assert schedule(cluster, [urgent], as_running(decision.start)).preempt == [2]


def test_large_trial_is_not_starved_within_quota() -> None:
    cluster = of(agent(1, 8), quotas={"label:x": 4})
    x = {"groups": ("label:x",)}
    allocations = running(cluster, request(1, 2, **x))
    decision = schedule(
        cluster, [request(2, 3, **x), request(3, 1, **x), request(4, 1)], allocations
    )
    assert started(decision) == [3, 4]  # 1 of the quota is left over when job 1 has ended
    decision = schedule(cluster, [request(2, 4, **x), request(3, 1, **x)], allocations)
    assert started(decision) == []


def test_too_small_quota_is_named_with_remedy() -> None:
    cluster = of(agent(1, 8), quotas={"label:x": 1})
    decision = schedule(cluster, [request(1, 2, groups=("label:x",)), request(2)], [])
    assert decision.impossible == [100]
    assert "`zerolab quota set label:x 2`" in reasons(decision)[1]
    assert started(decision) == [2]


# -- placement -------------------------------------------------------------------------------


def test_best_fit_agent_is_chosen() -> None:
    machines = [agent(1, 4), agent(2, 2)]
    assert place(2, machines, {1: [0, 1, 2, 3], 2: [0, 1]}) == {2: (0, 1)}


def test_trial_spans_agents_only_if_needed() -> None:
    machines = [agent(1, 2), agent(2, 2), agent(3, 3)]
    free = {1: [0, 1], 2: [0, 1], 3: [0, 1, 2]}
    assert place(3, machines, free) == {3: (0, 1, 2)}
    assert place(4, machines, free) == {3: (0, 1, 2), 1: (0,)}
    assert place(4, machines, free, single_agent=True) is None


def test_gpus_precede_cpu_slots_and_are_not_mixed() -> None:
    machines = [agent(1, 2), agent(2, 1, "cuda")]
    free = {1: [0, 1], 2: [0]}
    assert place(1, machines, free) == {2: (0,)}
    assert place(2, machines, free) == {1: (0, 1)}
    assert place(3, machines, free) is None


def test_closed_and_excluded_agents_are_skipped() -> None:
    cluster = of(agent(1, 2, closed="is disabled"), agent(2, 2))
    only_first = Request(100, job(1), 1, frozenset({2}))
    decision = schedule(cluster, [only_first, request(2)], [])
    assert [(s.request.job.job_id, *s.slots) for s in decision.start] == [(2, 2)]
    assert reasons(decision) == {1: "it needs 1 slot, and agent a1 is disabled"}


def test_slots_are_reserved_during_quota_preemption() -> None:
    running_job = job(1, groups=("label:x",))
    running = [Allocation(1, running_job, {1: (0,)})]
    first = Request(2, job(2, slots=2, priority=1, groups=("label:x",)))
    behind = Request(3, job(3))
    cluster = Cluster([agent(1, 2)], {}, {"label:x": 2})
    decision = schedule(cluster, [first, behind], running)
    # Else it would start, and be preempted in the next round.
    assert (decision.start, decision.preempt) == ([], [1])
    assert decision.waiting[3].startswith("experiment 2 goes first")


# -- reasons ---------------------------------------------------------------------------------


def test_reason_names_missing_slots() -> None:
    def reason_of(cluster: Cluster, waiting: Request) -> str:
        return schedule(cluster, [waiting], []).waiting[waiting.trial_id]

    many = request(1, 8)
    assert "no agent is connected" in reason_of(of(), many)
    missing = reason_of(of(agent(1, 2), agent(2, 4)), many)
    assert missing.startswith("it needs 8 slots on one machine, and there are at most 4 so far: ")
    assert "resources.slots_per_trial to 4 or less" in missing
    assert "at most 6" in reason_of(of(agent(1, 2), agent(2, 4)), request(1, 8, single_agent=False))
    ruled_out = Request(1, job(1), 1, frozenset({1}))
    assert reason_of(of(agent(1, 8)), ruled_out) == "its log policies exclude every agent"
    elsewhere = reason_of(of(agent(1, 8, pool="big")), request(1))
    assert elsewhere.startswith("no agent of pool default is connected: start one with")
    assert elsewhere.endswith("agents are in big")
    partly = AgentSlots(1, (0,), name="a1", disabled=1)
    assert "at most 1 (1 of agent a1 is disabled)" in reason_of(of(partly), request(1, 2))


def test_reason_names_first_job() -> None:
    cluster = of(agent(1, 3))
    allocations = running(cluster, request(1, 2, max_slots=2))
    waiting = [
        request(2, 3),
        Request(201, request(2, 3).job, 1, frozenset({9})),
        request(4, 2),
        request(5, 1),
        request(1, 1, max_slots=2),
    ]
    decision = schedule(cluster, waiting, allocations)
    first = "experiment 2 goes first"
    assert decision.waiting == {
        100: "its experiment holds 2 of the 2 slots of resources.max_slots",
        200: "it needs 3 slots on one machine, of which 1 is free",
        201: "an earlier trial of its experiment goes first",
        400: first,
        500: f"{first}, and could wait longer if this job started now",
    }
