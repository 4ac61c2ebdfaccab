"""Job queue over REST: order, pools, quotas, waiting times."""

from typing import Any

import pytest

from tests.server.helpers import PREFIX, Server
from zeroserver.store.schema import experiments


def queue(server: Server, pool: str | None = None) -> list[int]:
    jobs = server.get("/jobs", **({} if pool is None else {"pool": pool}))["jobs"]
    return [job["experiment_id"] for job in jobs]


def job(server: Server, experiment_id: int) -> dict[str, Any]:
    jobs = server.get("/jobs")["jobs"]
    return next(row for row in jobs if row["experiment_id"] == experiment_id)


def error_text(server: Server, method: str, path: str, body: Any, status: int) -> str:
    response = server.http.request(method, PREFIX + path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return " ".join([error["message"], *error["problems"]])


def running(server: Server, *agents: int) -> list[int]:
    return sorted(item.spec.experiment_id for agent in agents for item in server.work(agent))


def finish_first_run(server: Server, agent_id: int = 1) -> None:
    server.exit(server.work(agent_id)[0].run_id, 0)


def resources(**values: Any) -> dict[str, Any]:
    return {"hyperparameters": {}, "resources": values}


def add_named_agent(server: Server, name: str, slots: int = 1, **more: Any) -> int:
    devices = [{"id": number, "device": "cpu"} for number in range(slots)]
    body = {"name": name, "host": name, "slots": devices, **more}
    agent_id: int = server.post("/agents", body)["agent_id"]
    return agent_id


@pytest.mark.needs_extension("queue")
def test_job_moved_ahead_starts_next(server: Server) -> None:
    server.add_agent()
    for _ in range(4):
        server.submit()
    assert queue(server) == [1, 2, 3, 4]
    moved = server.post("/jobs/4/move", {"ahead_of": 2})["job"]
    assert (moved["place"], moved["priority"]) == (1, 42)  # experiment 1 runs
    server.post("/jobs/2/move", {"behind": 3})
    assert queue(server) == [1, 4, 3, 2]
    order = []
    for _ in range(4):
        order += running(server, 1)
        finish_first_run(server)
    assert order == [1, 4, 3, 2]


@pytest.mark.needs_extension("queue")
def test_only_waiting_experiments_have_a_place(sqlite_server: Server) -> None:
    server = sqlite_server
    server.add_agent()
    for _ in range(4):
        server.submit()
    server.act("pause", 2)
    rows = [(row["experiment_id"], row["place"]) for row in server.get("/jobs")["jobs"]]
    assert rows == [(1, None), (3, 1), (4, 2), (2, None)]
    server.act("activate", 2)
    rows = [(row["experiment_id"], row["place"]) for row in server.get("/jobs")["jobs"]]
    assert rows == [(1, None), (2, 1), (3, 2), (4, 3)]


@pytest.mark.needs_extension("queue")
def test_repeated_moves_to_one_position(sqlite_server: Server) -> None:
    for _ in range(3):
        sqlite_server.submit()
    for turn in range(80):
        sqlite_server.post(f"/jobs/{2 + turn % 2}/move", {"ahead_of": 3 - turn % 2})
        sqlite_server.post("/jobs/1/move", {"ahead_of": 2 + turn % 2})
    assert queue(sqlite_server) == [1, 3, 2]


@pytest.mark.needs_extension("queue")
def test_moved_job_adopts_priority_of_target(sqlite_server: Server) -> None:
    sqlite_server.submit(**resources(priority=10))
    sqlite_server.submit(**resources(priority=50))
    sqlite_server.submit(**resources(priority=50))
    sqlite_server.post("/jobs/3/move", {"ahead_of": 1})
    assert queue(sqlite_server) == [3, 1, 2]
    assert job(sqlite_server, 3)["priority"] == 10


@pytest.mark.needs_extension("queue")
def test_invalid_move_is_rejected_with_remedy(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.submit(**resources(resource_pool="other"))
    server.submit()
    server.act("kill", 3)
    assert "must be two" in error_text(server, "POST", "/jobs/1/move", {"ahead_of": 1}, 422)
    assert "name one of" in error_text(server, "POST", "/jobs/1/move", {}, 422)
    assert "within its pool" in error_text(server, "POST", "/jobs/1/move", {"behind": 2}, 409)
    assert "no longer in the queue" in error_text(
        server, "POST", "/jobs/1/move", {"behind": 3}, 409
    )
    assert "no experiment 9" in error_text(server, "POST", "/jobs/9/move", {"behind": 1}, 404)
    assert queue(server, "default") == [1]


@pytest.mark.needs_extension("queue")
def test_raised_priority_preempts_lower(server: Server) -> None:
    server.add_agent()
    server.submit()
    server.submit()
    spec = server.begin()
    server.request("PATCH", "/jobs/2", json={"priority": 10})
    assert server.directive(spec.run_id) == "preempt"
    server.exit(spec.run_id, 66)
    assert running(server, 1) == [2]
    assert "of which none is free" in server.experiment(1)["waiting_reason"]


@pytest.mark.needs_extension("queue")
def test_max_slots_can_be_changed_while_queued(sqlite_server: Server) -> None:
    server = sqlite_server
    server.add_agent(4)
    searcher = {"name": "random", "metric": "loss", "max_length": 9, "max_trials": 6}
    server.submit(searcher=searcher, **resources(max_slots=1))
    assert running(server, 1) == [1]
    assert "resources.max_slots" in job(server, 1)["waiting_reason"]
    server.request("PATCH", "/jobs/1", json={"max_slots": 2})
    assert running(server, 1) == [1, 1]
    server.request("PATCH", "/jobs/1", json={"max_slots": None})
    assert running(server, 1) == [1, 1, 1, 1]
    assert job(server, 1)["max_slots"] is None
    assert "slots_per_trial" in error_text(
        server, "PATCH", f"/jobs/{server.submit(**resources(slots_per_trial=3))['id']}",
        {"max_slots": 2}, 422,
    )  # fmt: skip


@pytest.mark.needs_extension("queue")
def test_experiment_waits_for_agent_of_its_pool(server: Server) -> None:
    add_named_agent(server, "a")
    server.submit(**resources(resource_pool="big"))
    reason = server.experiment()["waiting_reason"]
    assert reason == (
        "no agent of pool big is connected: start one with `zerolab agent start --pool big`; "
        "agents are in default"
    )
    assert server.trial()["waiting_reason"] == reason
    big = add_named_agent(server, "b", pool="big")
    assert running(server, big) == [1]
    pools = {pool.pop("name"): pool for pool in server.get("/pools")["pools"]}
    assert pools["default"]["free_slots"] == 1
    assert pools["big"] == {
        "policy": "fair_share", "agents": 1, "slots": 1, "free_slots": 0, "jobs": 1,
        "max_slots": None,
    }  # fmt: skip


@pytest.mark.needs_extension("queue")
def test_pool_uses_its_policy(server: Server) -> None:
    server.request("PUT", "/pools/default", json={"policy": "fifo"})
    for priority in (99, 50, 1):
        server.submit(**resources(priority=priority))
    server.add_agent()
    assert running(server, 1) == [1]
    assert server.directive(server.work()[0].run_id) == "train"
    assert queue(server) == [1, 2, 3]
    server.request("PUT", "/pools/default", json={"policy": "priority"})
    assert server.directive(server.work()[0].run_id) == "preempt"
    assert queue(server) == [1, 3, 2]  # experiment 1 still holds its slot
    assert "name" in error_text(server, "PUT", "/pools/.x", {"policy": "fifo"}, 422)
    assert "policy" in error_text(server, "PUT", "/pools/x", {"policy": "round"}, 422)


@pytest.mark.needs_extension("queue")
@pytest.mark.parametrize("group", ["label/vision x", "pool/default", "user/admin"])
def test_quota_limits_total_slots(server: Server, group: str) -> None:
    server.add_agent(4)
    response = server.request("PUT", f"/quotas/{group}", json={"max_slots": 2})
    name = group.replace("/", ":")
    quota = {
        "group": name, "max_slots": 2, "held_slots": 0, "is_default": False, "request_limit": None,
    }  # fmt: skip
    assert response == {"quota": quota}
    for _ in range(3):
        server.submit(labels=["vision x"])
    server.submit(**resources(resource_pool="none"))
    assert running(server, 1) == [1, 2]
    assert (
        job(server, 3)["waiting_reason"]
        == f"it needs 1 slot, and 2 of the 2 of quota {name} are held"
    )
    assert server.get("/quotas")["quotas"] == [quota | {"held_slots": 2}]
    server.request("DELETE", f"/quotas/{group}")
    assert running(server, 1) == [1, 2, 3]
    assert f"no quota {name}" in error_text(server, "DELETE", f"/quotas/{group}", None, 404)


@pytest.mark.needs_extension("queue")
def test_quota_of_unknown_user_is_rejected(sqlite_server: Server) -> None:
    text = error_text(sqlite_server, "PUT", "/quotas/user/ann", {"max_slots": 2}, 422)
    assert "user: must be one of admin, got 'ann'" in text


@pytest.mark.needs_extension("queue")
def test_added_label_applies_quota(sqlite_server: Server) -> None:
    server = sqlite_server
    server.request("PUT", "/quotas/label/x", json={"max_slots": 1})
    server.submit(labels=["x"])
    server.submit()
    server.request("PATCH", "/experiments/2", json={"labels": ["x"]})
    server.add_agent(2)
    assert running(server, 1) == [1]


def test_request_over_quota_names_remedy(sqlite_server: Server) -> None:
    sqlite_server.add_agent(slots=2)
    for labels in ([], ["task"]):  # in an experiment file and with `zerolab task run`
        sqlite_server.submit(resources={"slots_per_trial": 4}, labels=labels)
    reasons = [sqlite_server.experiment(number)["waiting_reason"] for number in (1, 2)]
    assert "or set resources.slots_per_trial to 2 or less" in reasons[0]
    assert "or set --slots to 2 or less" in reasons[1]


def test_job_over_max_queue_time_ends_with_reason(server: Server) -> None:
    server.add_agent()
    server.submit()
    server.submit(**resources(queue_time=60))
    server.tick()
    server.tick(59)
    assert server.experiment(2)["state"] == "ACTIVE"
    server.tick(2)
    ended = server.experiment(2)
    assert (ended["state"], server.trials(2)[0]["state"]) == ("ERROR", "CANCELED")
    assert ended["error"] == (
        "it has waited for slots for more than 60 s (resources.queue_time): "
        "it needs 1 slot, of which none is free"
    )
    assert server.experiment(1)["state"] == "ACTIVE"


def test_running_or_paused_job_has_no_queue_time(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(**resources(queue_time=60))
    server.tick()
    server.act("pause")
    server.tick(100)
    server.act("activate")
    server.tick()
    server.tick(50)
    server.add_agent()
    server.tick()
    server.tick(1000)
    assert server.experiment()["state"] == "ACTIVE"


@pytest.mark.needs_extension("queue")
def test_backfill_starts_small_job(
    sqlite_server: Server,
) -> None:
    server = sqlite_server
    server.add_agent(4)
    server.submit(**resources(slots_per_trial=3))
    server.submit(**resources(slots_per_trial=2))
    server.submit()
    server.submit()
    assert running(server, 1) == [1, 3]
    assert (
        job(server, 2)["waiting_reason"] == "it needs 2 slots on one machine, of which none is free"
    )
    assert job(server, 4)["waiting_reason"] == "experiment 2 goes first"
    logs = [line["text"] for line in server.get("/experiments/3/logs")["logs"]]
    assert any(
        "starts before experiment 2, which waits and is not delayed" in text for text in logs
    )
    finish_first_run(server)
    assert running(server, 1) == [2, 3, 4]


@pytest.mark.parametrize(
    ("searcher", "resources", "bound"),
    [
        ({"name": "random", "max_trials": 9, "max_concurrent_trials": 3}, {}, (6, "searcher")),
        ({"name": "random", "max_trials": 9, "max_concurrent_trials": 0}, {}, (None, "resources")),
        ({"name": "random", "max_trials": 9}, {"max_slots": 4}, (4, "resources")),
        ({"name": "single"}, {}, (None, "resources")),
    ],
)
def test_max_slots_column_matches_config(
    server: Server, searcher: dict[str, object], resources: dict[str, object], bound: object
) -> None:
    experiment = server.submit(
        searcher={"metric": "loss", "max_length": 10, **searcher},
        resources={"slots_per_trial": 2, **resources},
        hyperparameters={"deepspeed_config": "ds_config.json"},
    )
    server.write(lambda work: work.save(experiments, experiment["id"], config="not to be read"))
    orchestrator = server.services.orchestrator
    orchestrator.queue.jobs.clear()
    server.tick()
    queued = orchestrator.queue.jobs[experiment["id"]]
    assert (queued.max_slots, queued.max_slots_key.partition(".")[0]) == bound
