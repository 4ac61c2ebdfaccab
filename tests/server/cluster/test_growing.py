"""Elastic trials that started on fewer slots grow when slots are free."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.server.helpers import PLAYED, Server, checkpoint, serve
from zerolab.contract.spec import EXIT_INFRASTRUCTURE
from zerolab.extensions.commands.agent import row_of
from zerolab.extensions.commands.task import all_slots
from zeroserver.orchestrator.cluster.scheduler_input import down_slots

PAUSE_S = 60.0
PATIENT = replace(PLAYED, grow_first_s=PAUSE_S)
LEFT, PREEMPTED = 0, 66


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serve(tmp_path, timings=PATIENT) as served:
        served.add_agent(slots=4)
        yield served


def elastic(**more: Any) -> dict[str, Any]:
    return {"resources": {"slots_per_trial": 4, "elastic": {"min_slots": 2}, **more}}


def start_on_two_slots(server: Server) -> int:
    """Start experiment 2 on two slots while experiment 1 has the others; return its run."""
    server.submit(resources={"slots_per_trial": 2})
    server.submit(**elastic())
    server.begin(1)
    spec = server.begin(2)
    assert (spec.slots, spec.planned_slots) == (2, 4)
    return spec.run_id


def free_all(server: Server, trial_id: int = 1) -> None:
    server.exit(server.run_of(trial_id).run_id, LEFT)


def job(server: Server, experiment_id: int) -> dict[str, Any]:
    jobs = server.get("/jobs")["jobs"]
    return next(row for row in jobs if row["experiment_id"] == experiment_id)


def grow_at(server: Server, run_id: int, steps: int) -> str:
    """Save a checkpoint of a run; return its directive."""
    server.report(run_id, checkpoint(steps))
    return server.directive(run_id)


def test_elastic_trial_grows_at_checkpoint(
    server: Server,
) -> None:
    run_id = start_on_two_slots(server)
    server.tick(PAUSE_S)
    assert grow_at(server, run_id, 10) == "train"  # nothing is free
    assert job(server, 1)["fewer_reason"] is None
    free_all(server)
    server.tick()
    assert server.directive(run_id) == "train"  # not before the next checkpoint
    reason = "trial 2 runs on 2 of its 4 slots, and takes more at a checkpoint, when they are free"
    assert job(server, 2)["fewer_reason"] == reason
    assert grow_at(server, run_id, 20) == "preempt"
    assert (
        job(server, 2)["fewer_reason"] == "trial 2 runs on 2 of its 4 slots, and leaves them for 4"
    )
    server.exit(run_id, PREEMPTED, "preempted at batch 20")
    spec = server.begin(2)
    assert spec.slots == spec.planned_slots == 4
    assert spec.latest_checkpoint is not None
    assert spec.latest_checkpoint.steps_completed == 20
    trial = server.trial(2)
    assert (trial["state"], trial["restarts"]) == ("RUNNING", 0)
    assert job(server, 2)["fewer_reason"] is None
    runs = {row["id"]: row["reason"] for row in server.get("/trials/2/runs")["runs"]}
    assert runs[run_id] == "it left for more slots: 4 were free for its trial"
    lines = [row["text"] for row in server.get("/trials/2/logs")["logs"]]
    assert any("has 2 of the 4 slots of its trial, and 4 are free for it" in row for row in lines)
    assert grow_at(server, spec.run_id, 30) == "train"  # it has all of them


def test_growth_delay_doubles(server: Server) -> None:
    run_id = start_on_two_slots(server)
    free_all(server)
    server.tick(PAUSE_S - 1)
    assert grow_at(server, run_id, 10) == "train"
    server.tick(1)
    assert grow_at(server, run_id, 11) == "preempt"
    server.exit(run_id, PREEMPTED)
    full_run = server.begin(2)
    server.submit(resources={"slots_per_trial": 2, "priority": 1})  # takes two of them away
    assert server.directive(full_run.run_id) == "preempt"
    server.exit(full_run.run_id, PREEMPTED)
    server.begin(3)
    again = server.begin(2)
    assert again.slots == 2
    free_all(server, 3)
    server.tick(PAUSE_S)
    assert grow_at(server, again.run_id, 20) == "train"
    server.tick(PAUSE_S)
    assert grow_at(server, again.run_id, 21) == "preempt"


def test_no_growth_for_slots_of_queued_jobs(server: Server) -> None:
    run_id = start_on_two_slots(server)
    server.submit(resources={"slots_per_trial": 4, "max_slots": 4, "priority": 1})
    assert server.directive(run_id) == "preempt"  # for the other one, not for growth
    assert grow_at(server, run_id, 10) == "preempt"
    assert job(server, 2)["fewer_reason"].endswith("takes more at a checkpoint, when they are free")
    assert server.sql("SELECT COUNT(*) FROM runs WHERE grows_to IS NOT NULL") == [(0,)]


def test_no_growth_at_last_checkpoint_or_fixed_size(
    server: Server,
) -> None:
    run_id = start_on_two_slots(server)
    free_all(server)
    server.tick(PAUSE_S)
    assert grow_at(server, run_id, 100) == "train"  # it is finished
    server.submit(resources={"slots_per_trial": 1})
    plain = server.begin(3)
    server.tick(PAUSE_S)
    assert grow_at(server, plain.run_id, 10) == "train"


def test_slots_of_lost_node_are_not_assigned(server: Server) -> None:
    server.submit(**elastic())
    lost = server.begin(1)
    assert lost.slots == 4
    server.add_agent(slots=4, up=2)
    assert [slot["down"] for slot in server.get("/agents")["agents"][0]["slots"]][1:3] == [0, 1]
    assert server.directive(lost.run_id) == "train"  # its run detects the lost node itself
    server.exit(lost.run_id, EXIT_INFRASTRUCTURE, "Slurm's job 7 ended as NODE_FAIL")
    server.tick(PAUSE_S)
    run = server.begin(1)
    assert (run.slots, run.planned_slots) == (2, 4)
    server.submit(resources={"slots_per_trial": 4})
    reason = "there are at most 2 (for 2 of agent agent its cluster has no node now)"
    assert reason in server.trial(2)["waiting_reason"]
    assert server.get("/info")["cluster"]["free_slots"] == 0
    server.add_agent(slots=4)
    server.tick(PAUSE_S)
    assert grow_at(server, run.run_id, 10) == "preempt"


def test_lost_node_is_an_idle_one_if_possible(server: Server) -> None:
    server.submit(resources={"slots_per_trial": 2, "elastic": {"min_slots": 1}})
    server.submit(resources={"slots_per_trial": 2})
    lost, other = server.begin(1), server.run_of(2)
    assert other.slot_ids == [2, 3]
    server.add_agent(slots=4, up=3)
    server.exit(lost.run_id, EXIT_INFRASTRUCTURE, "Slurm's job 7 ended as NODE_FAIL")
    server.tick(PAUSE_S)
    assert server.begin(1).slots == 1  # the other run has two of the three
    assert server.get("/info")["cluster"]["free_slots"] == 0
    agents = server.get("/agents")["agents"]
    assert [slot["down"] for slot in agents[0]["slots"]] == [False, True, False, False]
    assert all_slots(agents, "default") == (3, 1)
    assert row_of(agents[0])[5] == "4 (1 without a node)"


@pytest.mark.parametrize(
    ("lost", "used_slots", "expected"),
    [
        (0, [0], []),
        (1, [], [4, 5]),
        (1, [4, 5], [2, 3]),
        (1, [5], [2, 3]),
        (2, [2, 4], [0, 1, 4, 5]),
        (1, [0, 2, 4], [4, 5]),
        (3, [0], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_lost_nodes_are_counted(lost: int, used_slots: list[int], expected: list[int]) -> None:
    slots = [{"id": i, "node": i // 2, "down": i // 2 >= 3 - lost} for i in range(6)]
    assert sorted(down_slots(slots, used_slots)) == expected
