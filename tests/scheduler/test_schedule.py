from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.scheduler import AgentSlots, Allocation, Decision, Request, place, schedule


def request(trial_id: int, slots: int = 1, **more: object) -> Request:
    values: dict[str, object] = {"experiment_id": 1, "order": trial_id, **more}
    return Request(trial_id=trial_id, slots=slots, **values)  # type: ignore[arg-type]


def agent(agent_id: int, slots: int, kind: str = "cpu") -> AgentSlots:
    return AgentSlots(agent_id, tuple(range(slots)), kind)


def started(decision: Decision) -> list[int]:
    return [allocation.request.trial_id for allocation in decision.start]


requests = st.lists(
    st.builds(
        Request,
        trial_id=st.integers(1, 10_000),
        experiment_id=st.integers(1, 3),
        slots=st.integers(1, 6),
        order=st.integers(1, 99),
        priority=st.sampled_from([1, 42, 99]),
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        max_slots=st.sampled_from([None, 6, 8]),
        single_agent=st.booleans(),
        excluded=st.sampled_from([frozenset(), frozenset({1})]),
    ),
    max_size=8,
    unique_by=(lambda r: r.trial_id, lambda r: r.order),
)
agents = st.lists(
    st.builds(agent, st.integers(1, 4), st.integers(0, 5), st.sampled_from(["cpu", "cuda"])),
    max_size=4,
    unique_by=lambda a: a.agent_id,
)


@settings(max_examples=150, deadline=None)
@given(agents, requests, requests)
def test_slots_are_given_whole_and_never_twice(
    machines: list[AgentSlots], before: list[Request], after: list[Request]
) -> None:
    running = schedule(machines, before, []).start
    known = {allocation.request.trial_id for allocation in running}
    waiting = [one for one in after if one.trial_id not in known]
    decision = schedule(machines, waiting, running)
    taken = [
        (agent_id, slot)
        for allocation in [*running, *decision.start]
        for agent_id, slots in allocation.slots.items()
        for slot in slots
    ]
    assert len(taken) == len(set(taken))
    kinds = {machine.agent_id: machine.kind for machine in machines}
    for allocation in decision.start:
        asked = allocation.request
        assert sum(map(len, allocation.slots.values())) == asked.slots
        assert len({kinds[agent_id] for agent_id in allocation.slots}) == 1
        assert not asked.excluded & set(allocation.slots)
        assert len(allocation.slots) == 1 or not asked.single_agent
    for count, allocation in enumerate(decision.start):
        asked = allocation.request
        held = [*running, *decision.start[: count + 1]]
        mine = [a.request.slots for a in held if a.request.experiment_id == asked.experiment_id]
        assert asked.max_slots is None or sum(mine) <= asked.max_slots
    by_id = {allocation.request.trial_id: allocation.request for allocation in running}
    assert set(decision.preempt) <= set(by_id)
    if decision.preempt:
        best = min(one.priority for one in waiting)
        assert all(by_id[trial_id].priority > best for trial_id in decision.preempt)
    assert schedule(machines, waiting, running) == decision


@settings(max_examples=60, deadline=None)
@given(agents, requests)
def test_every_possible_trial_runs_in_the_end(
    machines: list[AgentSlots], waiting: list[Request]
) -> None:
    left = [one for one in waiting if one.max_slots is None or one.slots <= one.max_slots]
    for _ in range(len(left)):
        decision = schedule(machines, left, [])
        assert started(decision) or len(decision.impossible) == len(left)
        left = [one for one in left if one.trial_id not in started(decision)]
    assert schedule(machines, left, []).start == []


def test_the_first_asked_runs_first() -> None:
    decision = schedule([agent(1, 2)], [request(2), request(1), request(3)], [])
    assert started(decision) == [1, 2]
    assert decision.preempt == []


def test_experiments_share_slots_by_weight() -> None:
    waiting = [request(i, experiment_id=1) for i in range(1, 7)]
    waiting += [request(i, experiment_id=2, weight=2.0) for i in range(11, 17)]
    decision = schedule([agent(1, 6)], waiting, [])
    mine = [a.request.experiment_id for a in decision.start]
    assert (mine.count(1), mine.count(2)) == (2, 4)


def test_a_large_trial_is_not_starved_by_small_ones_behind_it() -> None:
    running = schedule([agent(1, 4)], [request(1, 2)], []).start
    decision = schedule([agent(1, 4)], [request(2, 4), request(3, 1)], running)
    assert decision == Decision()


def test_a_trial_that_can_never_fit_blocks_nobody() -> None:
    decision = schedule([agent(1, 2)], [request(1, 3), request(2, 2)], [])
    assert decision.impossible == [1]
    assert started(decision) == [2]


def test_a_higher_priority_preempts_the_newest_of_the_lowest_and_no_more_than_needed() -> None:
    machines = [agent(1, 4)]
    running = schedule(
        machines,
        [request(1, 1, priority=50), request(2, 1, priority=90), request(3, 2, priority=90)],
        [],
    ).start
    decision = schedule(machines, [request(9, 2, priority=10)], running)
    assert decision.preempt == [3]
    stopping = [Allocation(a.request, a.slots, stopping=a.request.trial_id == 3) for a in running]
    assert schedule(machines, [request(9, 2, priority=10)], stopping) == Decision()
    gone = [a for a in running if a.request.trial_id != 3]
    assert started(schedule(machines, [request(9, 2, priority=10)], gone)) == [9]


def test_nothing_is_preempted_where_that_would_not_make_room() -> None:
    machines = [agent(1, 2)]
    running = schedule(machines, [request(1, priority=10), request(2, priority=90)], []).start
    assert schedule(machines, [request(3, 2, priority=20)], running) == Decision()


def test_equal_priority_preempts_nobody() -> None:
    running = schedule([agent(1, 1)], [request(1)], []).start
    assert schedule([agent(1, 1)], [request(2, experiment_id=2)], running) == Decision()


def test_an_experiment_holds_no_more_than_its_max_slots() -> None:
    waiting = [request(i, 2, max_slots=4) for i in (1, 2, 3)] + [request(4, 2, experiment_id=2)]
    assert sorted(started(schedule([agent(1, 8)], waiting, []))) == [1, 2, 4]


def test_a_trial_goes_to_the_agent_that_it_fills_best() -> None:
    machines = [agent(1, 4), agent(2, 2)]
    assert place(request(1, 2), machines, {1: [0, 1, 2, 3], 2: [0, 1]}) == {2: (0, 1)}


def test_a_trial_is_spread_over_agents_only_when_no_one_holds_it() -> None:
    machines = [agent(1, 2), agent(2, 2), agent(3, 3)]
    free = {1: [0, 1], 2: [0, 1], 3: [0, 1, 2]}
    assert place(request(1, 3), machines, free) == {3: (0, 1, 2)}
    assert place(request(1, 4), machines, free) == {3: (0, 1, 2), 1: (0,)}
    assert place(request(1, 4, single_agent=True), machines, free) is None


def test_gpus_come_before_cpu_slots_and_are_not_mixed_with_them() -> None:
    machines = [agent(1, 2), agent(2, 1, "cuda")]
    free = {1: [0, 1], 2: [0]}
    assert place(request(1, 1), machines, free) == {2: (0,)}
    assert place(request(1, 2), machines, free) == {1: (0, 1)}
    assert place(request(1, 3), machines, free) is None


@settings(max_examples=100, deadline=None)
@given(agents, requests, requests)
def test_every_trial_starts_or_is_told_why_it_waits(
    machines: list[AgentSlots], before: list[Request], after: list[Request]
) -> None:
    running = schedule(machines, before, []).start
    known = {allocation.request.trial_id for allocation in running}
    waiting = [one for one in after if one.trial_id not in known]
    decision = schedule(machines, waiting, running)
    assert set(decision.waiting) == {one.trial_id for one in waiting} - set(started(decision))
    assert all(decision.waiting.values())


def test_the_reason_for_a_wait_names_what_is_missing() -> None:
    many = request(1, 8, single_agent=True)
    assert "no agent is there" in schedule([], [many], []).waiting[1]
    told = schedule([agent(1, 2), agent(2, 4)], [many], []).waiting[1]
    assert told.startswith("it needs 8 slots on one machine, and there are at most 4: it cannot")
    assert "resources.slots_per_trial to 4 or less" in told
    spread = schedule([agent(1, 2), agent(2, 4)], [request(1, 8)], []).waiting[1]
    assert "at most 6" in spread
    ruled_out = schedule([agent(1, 8)], [request(1, excluded=frozenset({1}))], []).waiting[1]
    assert ruled_out == "its log policies rule out every agent that is there"


def test_the_reason_for_a_wait_names_who_goes_first() -> None:
    machines = [agent(1, 3)]
    running = schedule(machines, [request(1, 2, max_slots=2)], []).start
    waiting = [
        request(2, 2, experiment_id=2),
        request(3, 1, experiment_id=2),
        request(4, 1, experiment_id=3),
        request(5, 1, max_slots=2),
    ]
    assert schedule(machines, waiting, running).waiting == {
        2: "it needs 2 slots, of which 1 is free",
        3: "an earlier trial of its experiment goes first",
        4: "experiment 2 goes first",
        5: "its experiment holds 2 of the 2 slots of resources.max_slots",
    }
    more_important = schedule(machines, [request(9, 2, experiment_id=9, priority=1)], running)
    assert more_important.preempt == [1]
    assert more_important.waiting[9].endswith("other runs are asked to make room")
