"""Large searches: replay outside of the writer, deletion in parts."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import GONE_S, Server, checkpoint, serve, training, validation
from tests.waiting import until
from zerolab.contract.spec import EXIT_PREEMPTED
from zerolab.searcher import Create
from zeroserver import services
from zeroserver.extensions.checkpoint_removal import router as checkpoint_routes
from zeroserver.extensions.checkpoint_removal import service as checkpoint_removal
from zeroserver.orchestrator import experiment_service, periodic, scheduling
from zeroserver.orchestrator.checkpoints import checkpoint_service
from zeroserver.orchestrator.cluster import agent_service
from zeroserver.orchestrator.search import search_service
from zeroserver.orchestrator.search.search_service import Replay
from zeroserver.orchestrator.unit_of_work import UnitOfWork

SPACE = {"deepspeed_config": "ds_config.json", "lr": {"type": "double", "minval": 0, "maxval": 1}}
RANDOM = {
    "name": "random", "metric": "loss", "max_length": 10, "max_trials": 6,
    "max_concurrent_trials": 6,
}  # fmt: skip
HALVING = {
    "name": "async_halving", "metric": "loss", "max_length": 16, "max_trials": 6,
    "max_concurrent_trials": 6, "num_rungs": 2,
}  # fmt: skip


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that have replayed a search."""
    threads: list[str] = []
    fold = search_service._fold

    def recording_fold(*arguments: Any) -> Replay:
        threads.append(threading.current_thread().name)
        return fold(*arguments)

    monkeypatch.setattr(search_service, "_fold", recording_fold)
    return threads


def validated(server: Server) -> None:
    server.add_agent(slots=6)
    for number, item in enumerate(server.work()):
        server.post(f"/runs/{item.run_id}/started", {})
        server.report(item.run_id, validation(4, number / 10), checkpoint(4, str(number)))


def end(server: Server) -> None:
    server.act("cancel")
    for item in server.work():
        server.exit(item.run_id, EXIT_PREEMPTED)
    assert server.experiment()["state"] == "CANCELED"


def continue_search(server: Server, **searcher: Any) -> None:
    server.post("/experiments/1/continue", {"config": {"searcher": searcher}})
    assert server.experiment()["state"] == "ACTIVE"


def trial_in(server: Server, state: str) -> int:
    return next(int(trial["id"]) for trial in server.trials() if trial["state"] == state)


def grow_twice(server: Server) -> None:
    continue_search(server, max_trials=8)
    end(server)
    continue_search(server, max_trials=9)


def continue_trial(server: Server) -> None:
    continue_search(server, max_trials=8)
    end(server)
    server.post(f"/trials/{trial_in(server, 'CANCELED')}/continue")


def activate(server: Server) -> None:
    continue_search(server)
    server.act("pause")
    server.services.orchestrator.searches.searchers.clear()
    server.act("activate")


def view(server: Server) -> None:
    continue_search(server)
    server.services.orchestrator.searches.searchers.clear()
    assert server.get("/experiments/1/searcher")["searcher"]["problem"] is None


def kill_trial(server: Server) -> None:
    continue_search(server)
    server.services.orchestrator.searches.searchers.clear()
    server.post(f"/trials/{trial_in(server, 'QUEUED')}/kill")


@pytest.mark.parametrize(
    ("change", "searcher"),
    [
        (continue_search, RANDOM),
        (continue_search, HALVING),
        (grow_twice, HALVING),
        (continue_trial, HALVING),
        (activate, HALVING),
        (view, HALVING),
        (kill_trial, HALVING),
    ],
)
def test_writer_replays_no_search(
    sqlite_server: Server,
    replaying: list[str],
    searcher: dict[str, Any],
    change: Callable[[Server], None],
) -> None:
    server = sqlite_server
    server.submit(hyperparameters=SPACE, searcher=searcher)
    validated(server)
    end(server)
    change(server)
    assert replaying
    assert "writer" not in replaying


def test_start_loads_large_searches(
    tmp_path: Path, replaying: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_service, "_LARGE", 6)
    with serve(tmp_path) as server:
        server.submit(hyperparameters=SPACE, searcher=HALVING)
        server.submit(hyperparameters=SPACE, searcher={**HALVING, "max_trials": 5})
    with serve(tmp_path) as server:
        assert [*server.services.orchestrator.searches.searchers] == [1]
        validated(server)
    assert replaying.count("writer") <= 1  # of the small one


def test_growth_equals_replay(sqlite_server: Server) -> None:
    """The searcher in memory and one replayed from the events create the same trials."""
    server = sqlite_server
    server.submit(hyperparameters=SPACE, searcher=HALVING, reproducibility={"experiment_seed": 7})
    validated(server)
    end(server)
    grow_twice(server)

    def replayed(work: UnitOfWork) -> list[Any]:
        operations = work.searches.replay(1)
        return [operation for operation in operations if isinstance(operation, Create)]

    expected = server.write(replayed)
    rows = server.sql("SELECT request_id, seed FROM trials ORDER BY id")
    assert rows == [(item.trial_id, item.trial_seed) for item in expected]
    assert len(rows) == 9


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit deletions to a few rows a transaction."""
    monkeypatch.setattr(checkpoint_service, "AT_ONCE", 2)
    monkeypatch.setattr(experiment_service, "_TRIALS_AT_ONCE", 2)
    monkeypatch.setattr(experiment_service, "_EVENTS_AT_ONCE", 5)


TABLES = ("experiments", "trials", "runs", "checkpoints", "searcher_events", "points", "logs")


def count(server: Server, table: str) -> int:
    ((number,),) = server.sql(f"SELECT count(*) FROM {table}")
    return int(number)


def test_delete_in_parts(server: Server, small_parts: None) -> None:
    server.submit(hyperparameters=SPACE, searcher=HALVING)
    validated(server)
    end(server)
    before = server.services.database.jobs
    server.request("DELETE", "/experiments/1")
    assert server.services.database.jobs - before >= 6
    assert [count(server, table) for table in TABLES] == [0] * len(TABLES)


def test_interrupted_delete_is_repeated(server: Server, small_parts: None) -> None:
    server.submit(hyperparameters=SPACE, searcher=HALVING)
    validated(server)
    end(server)
    trials = count(server, "trials")
    while count(server, "trials") == trials:
        assert not server.write(lambda work: work.experiments.remove(1))
    experiment = server.experiment()
    assert experiment["num_trials"] == count(server, "trials")
    states = [trial["state"] for trial in server.trials()]
    assert experiment["canceled_trials"] == states.count("CANCELED")
    response = server.http.post("/api/v1/experiments/1/continue", json={})
    assert response.status_code == 409
    assert "is being deleted" in response.json()["error"]["message"]
    assert server.http.post("/api/v1/trials/6/continue").status_code == 409
    server.request("DELETE", "/experiments/1")
    assert [count(server, table) for table in TABLES] == [0] * len(TABLES)


def test_delete_trial_with_many_checkpoints(server: Server, small_parts: None) -> None:
    server.submit(searcher={**RANDOM, "max_trials": 1}, checkpoint_storage={"save_trial_latest": 9})
    server.add_agent()
    run_id = server.begin().run_id
    server.report(run_id, *(checkpoint(step) for step in range(1, 6)))
    end(server)
    server.request("DELETE", "/trials/1")
    assert (count(server, "trials"), count(server, "checkpoints")) == (0, 0)
    assert server.experiment()["num_trials"] == 0


@pytest.fixture
def small_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit removals to a few checkpoints a transaction."""
    for module in (checkpoint_service, checkpoint_removal, services, checkpoint_routes):
        monkeypatch.setattr(module, "AT_ONCE", 2)


def states(server: Server) -> list[str]:
    return [state for (state,) in server.sql("SELECT state FROM checkpoints ORDER BY id")]


def jobs_of(server: Server, change: Callable[[], Any]) -> int:
    before = server.services.database.jobs
    change()
    return server.services.database.jobs - before


def paused_search(server: Server) -> None:
    server.submit(
        hyperparameters=SPACE, searcher=RANDOM,
        checkpoint_storage={
            "save_trial_latest": 0, "save_trial_best": 0, "save_experiment_best": 1,
        },
    )  # fmt: skip
    validated(server)
    server.act("pause")
    for item in server.work():
        server.exit(item.run_id, EXIT_PREEMPTED)
    assert states(server) == ["COMPLETED"] * 6


def apply_policies(server: Server) -> None:
    assert server.http.portal is not None
    server.http.portal.call(server.services.apply_policies)


def test_cancel_applies_policy_in_parts(server: Server, small_changes: None) -> None:
    paused_search(server)
    assert jobs_of(server, partial(server.act, "cancel")) <= 2  # a tick may come between
    assert server.experiment()["state"] == "CANCELED"
    assert states(server) == ["COMPLETED"] * 6
    assert jobs_of(server, partial(apply_policies, server)) >= 4
    assert states(server).count("COMPLETED") == 1  # the best of the experiment
    assert server.sql("SELECT retention_due FROM experiments") == [(0,)]


def test_interrupted_policy_is_applied_at_next_start(tmp_path: Path, small_changes: None) -> None:
    with serve(tmp_path) as server:
        paused_search(server)
        server.act("cancel")
        ((trial_id,),) = server.sql("SELECT min(id) FROM trials")
        server.write(lambda work: work.checkpoints.thin_out(experiment_id=1, trial_ids=[trial_id]))
    with serve(tmp_path) as server:
        until("it continues", lambda: states(server).count("COMPLETED") == 1)
        until("it is done", lambda: server.sql("SELECT retention_due FROM experiments") == [(0,)])


def test_policy_spares_continued_trial(server: Server, small_changes: None) -> None:
    paused_search(server)
    server.act("cancel")
    continue_search(server)
    apply_policies(server)
    assert states(server) == ["COMPLETED"] * 6


def test_gc_removes_in_parts(server: Server, small_changes: None) -> None:
    server.submit(hyperparameters=SPACE, searcher=RANDOM)
    validated(server)
    end(server)
    policy = {"save_trial_latest": 0, "save_trial_best": 0, "save_experiment_best": 2}
    path = "/experiments/1/gc"
    dry = server.post(path, {**policy, "dry_run": True})
    assert states(server) == ["COMPLETED"] * 6
    responses: list[Any] = []
    assert jobs_of(server, lambda: responses.append(server.post(path, policy))) >= 4
    assert {**responses[0], "dry_run": True} == dry
    assert states(server) == ["COMPLETED"] * 2 + ["DELETED"] * 4


@pytest.mark.parametrize("globs", [[], ["weights"], ["w*", "other"]])
def test_remove_checkpoints_in_parts(server: Server, small_changes: None, globs: list[str]) -> None:
    server.submit(hyperparameters=SPACE, searcher=RANDOM)
    validated(server)
    end(server)
    uuids = [uuid for (uuid,) in server.sql("SELECT uuid FROM checkpoints ORDER BY id")]
    body = {"uuids": [uuids[0][:8], *uuids], "globs": globs}
    responses: list[Any] = []
    count = jobs_of(server, lambda: responses.append(server.post("/checkpoints/remove", body)))
    assert count >= 3
    assert [row["uuid"] for row in responses[0]["checkpoints"]] == uuids
    assert states(server) == ["DELETED"] * 6
    assert server.post("/checkpoints/remove", body)["checkpoints"] == []


def test_refused_removal_in_parts_removes_nothing(server: Server, small_changes: None) -> None:
    server.submit(hyperparameters=SPACE, searcher=RANDOM)
    validated(server)
    uuids = [uuid for (uuid,) in server.sql("SELECT uuid FROM checkpoints ORDER BY id")]
    response = server.http.post("/api/v1/checkpoints/remove", json={"uuids": uuids})
    assert response.status_code == 409
    assert "nothing was removed" in response.json()["error"]["message"]
    assert states(server) == ["COMPLETED"] * 6


def test_interrupted_delete_refuses_continue_after_restart(
    tmp_path: Path, small_parts: None
) -> None:
    with serve(tmp_path) as server:
        server.submit(hyperparameters=SPACE, searcher=HALVING)
        validated(server)
        end(server)
        assert not server.write(lambda work: work.experiments.remove(1))
    with serve(tmp_path) as server:
        response = server.http.post("/api/v1/experiments/1/continue", json={})
        assert response.status_code == 409
        assert "is being deleted" in response.json()["error"]["message"]
        server.request("DELETE", "/experiments/1")


@pytest.mark.parametrize("leaves", [False, True])
def test_lost_agent_ends_runs_in_parts(
    server: Server, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(agent_service, "_RUNS_AT_ONCE", 2)
    server.submit(hyperparameters=SPACE, searcher=RANDOM)
    server.add_agent(slots=6)
    assert len(server.work()) == 6
    if leaves:
        assert (
            jobs_of(server, lambda: server.post("/agents/1/leave", {"done": True})) >= 3
        )  # a tick may come between
    else:
        server.services.orchestrator.agents.seen[1] -= GONE_S
        server.tick()
        assert server.services.orchestrator.queue.unfinished
        assert server.get("/agents")["agents"][0]["alive"]
        server.tick()
        server.tick()
    assert not server.services.orchestrator.queue.unfinished
    assert not server.get("/agents")["agents"][0]["alive"]
    assert {state for (state,) in server.sql("SELECT state FROM runs")} == {"EXITED"}
    assert {trial["state"] for trial in server.trials()} == {"QUEUED"}


def test_start_of_many_runs_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_STARTS_AT_ONCE", 2)
    server.submit(hyperparameters=SPACE, searcher=RANDOM)
    server.add_agent(slots=6)
    assert len(server.work()) == 2
    server.tick()
    assert server.services.orchestrator.queue.unfinished
    server.tick()
    assert not server.services.orchestrator.queue.unfinished
    assert len(server.work()) == 6


def test_configs_are_parsed_in_parts_after_a_start(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = server.services.orchestrator.configs.configs
    for limits in (scheduling, "_STARTS_AT_ONCE"), (agent_service, "_PREEMPTED_AT_ONCE"):
        monkeypatch.setattr(*limits, 8)
    for _ in range(5):
        server.submit()
    until("the first tick is over", lambda: server.services.ticks)
    configs.clear()
    server.tick()
    assert not configs  # waiting experiments need none
    server.add_agent(slots=5)
    assert len(server.work()) == len(configs) == 2
    tick_until_done(server)
    assert len(server.work()) == len(configs) == 5
    configs.clear()
    server.write(lambda work: work.agents.close(1, None, drain=False))
    assert len(configs) == 2
    assert count_of_preempted(server) == 2
    assert jobs_of(server, lambda: server.post("/agents/1/disable", {"drain": False})) >= 2
    assert count_of_preempted(server) == 5


def count_of_preempted(server: Server) -> int:
    return len(server.sql("SELECT id FROM runs WHERE directive = 'preempt'"))


def test_points_of_long_trial_are_deleted_in_parts(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "FORGOTTEN", 60)
    server.submit()
    server.add_agent()
    first = server.begin().run_id
    server.report(first, *(training(step, 0.5) for step in range(1, 11)), checkpoint(10))
    server.report(first, *(training(step, 0.5) for step in range(11, 171)))
    server.exit(first, EXIT_PREEMPTED)
    assert server.work() == []
    assert 10 < count(server, "points") < 170
    server.tick()
    while server.services.orchestrator.queue.unfinished:
        server.tick()
    assert len(server.work()) == 1
    assert count(server, "points") == 10
    (curve,) = server.get("/trials/1/metrics", group="training", names="loss")["metrics"]
    assert [step for step, _ in curve["points"]] == list(range(1, 11))


def test_continue_reports_deleted_trials_at_once(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(hyperparameters=SPACE, searcher=RANDOM)
    validated(server)
    end(server)
    for trial_id in (1, 2, 5):
        server.request("DELETE", f"/trials/{trial_id}")
    continue_search(server)
    events = server.sql(
        "SELECT request_id, reason FROM searcher_events WHERE kind = 'exited_early' ORDER BY id"
    )
    assert [reason for _, reason in events] == ["user_canceled"] * 3
    server.services.orchestrator.searches.searchers.clear()
    assert server.get("/experiments/1/searcher")["searcher"]["problem"] is None


def tick_until_done(server: Server) -> int:
    """Run the periodic tick until no part is left; return the number of ticks."""
    ticks = 1
    server.tick()
    while server.services.orchestrator.queue.unfinished:
        server.tick()
        ticks += 1
    return ticks


def six_runs(server: Server, **changes: Any) -> None:
    server.submit(hyperparameters=SPACE, searcher=RANDOM, **changes)
    server.add_agent(slots=6)
    assert len(server.work()) == 6


def test_disabled_agent_releases_runs_in_parts(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_service, "_PREEMPTED_AT_ONCE", 2)
    six_runs(server)
    assert jobs_of(server, lambda: server.post("/agents/1/disable", {"drain": False})) >= 3
    assert server.sql("SELECT DISTINCT directive FROM runs") == [("preempt",)]


def test_late_runs_are_killed_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "_KILLED_AT_ONCE", 2)
    six_runs(server, preemption_timeout=10)
    server.act("pause")
    server.clock.now += 100
    assert tick_until_done(server) == 4
    assert server.sql("SELECT DISTINCT killed FROM runs") == [(1,)]


def test_runs_are_preempted_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_PREEMPTED_AT_ONCE", 1)
    server.request("PUT", "/pools/default", json={"policy": "priority"})
    six_runs(server)
    server.submit(resources={"slots_per_trial": 4, "priority": 1})
    assert tick_until_done(server) == 3
    directives = server.sql("SELECT directive, count(*) FROM runs GROUP BY 1 ORDER BY 1")
    assert directives == [("preempt", 4), ("train", 2)]


def test_long_waits_end_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "_ENDED_AT_ONCE", 1)
    for _ in range(3):
        server.submit(resources={"queue_time": 10})
    server.tick()
    server.clock.now += 100
    assert tick_until_done(server) == 3
    assert [server.experiment(number)["state"] for number in (1, 2, 3)] == ["ERROR"] * 3
