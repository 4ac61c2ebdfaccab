"""Agents over REST: register, leave, disable, lose and reconnect."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.access.test_users import add_user
from tests.server.cluster.test_queue import add_named_agent, error_text, running
from tests.server.helpers import GONE_S, PREFIX, SILENT_S, Server, checkpoint, serve, training
from zerolab.contract.messages import AgentLoad, RunExit, SlotLoad
from zerolab.contract.spec import EXIT_INFRASTRUCTURE
from zeroserver.orchestrator.caches import LoadHistory


def agent(server: Server, agent_id: int = 1) -> dict[str, Any]:
    row: dict[str, Any] = server.get(f"/agents/{agent_id}")["agent"]
    return row


def set_silence(server: Server, agent_id: int, seconds: float) -> None:
    """Set the time since an agent's last request."""
    server.services.orchestrator.agents.seen[agent_id] = time.monotonic() - seconds


def test_disabled_agent_gets_no_runs(server: Server) -> None:
    add_named_agent(server, "a")
    server.post("/agents/1/disable", {})
    assert agent(server)["state"] == "disabled"
    server.submit()
    assert server.experiment()["waiting_reason"] == "it needs 1 slot, and agent a is disabled"
    server.post("/agents/1/enable", {})
    assert running(server, 1) == [1]
    assert agent(server)["state"] == "ready"


def test_drained_agent_finishes_its_runs(
    server: Server,
) -> None:
    add_named_agent(server, "a", 2)
    server.submit()
    spec = server.begin()
    drained = server.post("/agents/1/disable", {"drain": True})["agent"]
    assert drained["state"] == "draining"
    assert server.directive(spec.run_id) == "train"
    server.submit()
    assert running(server, 1) == [1]
    server.exit(spec.run_id, 0)
    assert agent(server)["state"] == "disabled"
    assert running(server, 1) == []


def test_runs_of_disabled_agent_move(server: Server) -> None:
    add_named_agent(server, "a")
    other = add_named_agent(server, "b")
    server.submit()
    spec = server.begin()
    server.post("/agents/1/disable", {})
    assert server.directive(spec.run_id) == "preempt"
    server.exit(spec.run_id, 66)
    assert (running(server, 1), running(server, other)) == ([], [1])
    assert server.trial()["restarts"] == 0


def test_run_gets_agent_of_its_checkpoint(
    server: Server,
) -> None:
    add_named_agent(server, "a")
    other = add_named_agent(server, "b")
    server.submit()
    spec = server.begin()
    server.report(spec.run_id, checkpoint(1))
    server.exit(spec.run_id, 66)
    again = server.begin()
    server.post("/agents/1/disable", {})
    server.exit(again.run_id, 66)
    checkpoints = [run.latest_checkpoint for run in (spec, again, server.begin(1, other))]
    saved_on = [record and record.saved_on for record in checkpoints]
    assert saved_on == [None, "", f"agent a ({agent(server)['host']})"]


def test_disable_and_enable_single_slots(server: Server) -> None:
    add_named_agent(server, "a", 3)
    server.post("/agents/1/disable", {"slots": [1, 2]})
    for _ in range(2):
        server.submit()
    assert [slot["enabled"] for slot in agent(server)["slots"]] == [True, False, False]
    assert [item.slot_ids for item in server.work()] == [[0]]
    server.post("/agents/1/enable", {"slots": [2]})
    assert [item.slot_ids for item in server.work()] == [[0], [2]]
    run_id = server.work()[1].run_id
    server.post("/agents/1/disable", {"slots": [2]})
    assert server.directive(run_id) == "preempt"
    assert server.directive(server.work()[0].run_id) == "train"
    message = error_text(server, "POST", "/agents/1/disable", {"slots": [3]}, 422)
    assert "slots: must be slots of agent a (0, 1, 2), got [3]" in message


def test_disabled_state_survives_registration(server: Server) -> None:
    add_named_agent(server, "a", 2)
    server.post("/agents/1/disable", {})
    server.post("/agents/1/disable", {"slots": [0]})
    add_named_agent(server, "a", 2)
    assert agent(server)["state"] == "disabled"
    server.post("/agents/1/enable", {})
    assert [slot["enabled"] for slot in agent(server)["slots"]] == [False, True]


def test_deregistered_agent_is_removed(server: Server) -> None:
    add_named_agent(server, "a")
    server.submit()
    spec = server.begin()
    server.post("/agents/1/leave", {})
    assert agent(server)["state"] == "leaving"
    server.exit(spec.run_id, 66)
    assert running(server, 1) == []
    server.post("/agents/1/leave", {"done": True})
    assert agent(server)["state"] == "gone"
    assert "no agent is connected" in server.experiment()["waiting_reason"]
    heartbeats = server.services.orchestrator.agents
    assert 1 in heartbeats.seen
    server.request("DELETE", "/agents/1")
    assert server.get("/agents")["agents"] == []
    assert 1 not in heartbeats.seen
    assert server.trial()["state"] == "QUEUED"


def test_connected_agent_cannot_be_removed(sqlite_server: Server) -> None:
    add_named_agent(sqlite_server, "a")
    assert "agent a is connected; stop it" in error_text(
        sqlite_server, "DELETE", "/agents/1", None, 409
    )
    assert "no agent 7" in error_text(sqlite_server, "DELETE", "/agents/7", None, 404)


def test_run_survives_short_agent_outage(server: Server) -> None:
    add_named_agent(server, "a")
    server.submit()
    spec = server.begin()
    set_silence(server, 1, SILENT_S)
    server.tick()
    assert agent(server)["state"] == "silent"
    add_named_agent(server, "b")
    server.submit()
    assert running(server, 2) == [2]  # a silent agent gets no new runs
    assert [item.run_id for item in server.work(1)] == [spec.run_id]
    server.report(spec.run_id, training(1, 0.5))
    assert agent(server)["state"] == "ready"
    server.tick()
    assert server.trial()["run_id"] == spec.run_id
    assert server.sql("SELECT COUNT(*) FROM runs WHERE trial_id = 1") == [(1,)]


def test_trials_of_lost_agent_restart_uncounted(
    server: Server,
) -> None:
    add_named_agent(server, "a")
    server.submit(max_restarts=0)
    spec = server.begin()
    set_silence(server, 1, GONE_S)
    add_named_agent(server, "b")
    server.tick()
    assert agent(server)["state"] == "gone"
    server.tick(2)
    assert running(server, 2) == [1]
    assert server.trial()["restarts"] == 0
    assert server.work(1) == []  # it reconnects too late: it gets no runs
    assert server.send(spec.run_id, 1, [training(1, 0.5)]).status_code == 409


def test_duplicate_agent_name_is_rejected(server: Server) -> None:
    add_named_agent(server, "a", identity="one")
    body = {"name": "a", "host": "h", "slots": [], "identity": "two"}
    assert "with another --name" in error_text(server, "POST", "/agents", body, 409)
    assert add_named_agent(server, "a", identity="one") == 1
    set_silence(server, 1, GONE_S)
    server.tick()
    assert server.post("/agents", body)["agent_id"] == 1
    path = f"{PREFIX}/agents/1/work"
    stranger = server.http.get(path, params={"wait_s": 0, "identity": "one"})
    assert stranger.status_code == 404
    assert server.http.get(path, params={"wait_s": 0, "identity": "two"}).is_success


@pytest.mark.parametrize("pool", ["", "a b", "/", "x" * 65])
def test_empty_pool_name_is_rejected(sqlite_server: Server, pool: str) -> None:
    body = {"name": "a", "host": "h", "slots": [], "pool": pool}
    assert "pool: must be 1 to 64 letters" in error_text(
        sqlite_server, "POST", "/agents", body, 422
    )


def test_server_stall_does_not_count_as_agent_silence(
    tmp_path: Path,
) -> None:
    with serve(tmp_path) as server:
        add_named_agent(server, "a")
        server.submit()
        spec = server.begin()
        orchestrator = server.services.orchestrator
        for _ in range(2):
            orchestrator.agents.seen[1] -= GONE_S
            orchestrator.agents.ticked -= GONE_S
            server.tick()  # before it noticed the stall,
            orchestrator.agents.note_tick()
            server.tick()  # and after that
            assert agent(server)["state"] != "gone"
            assert server.directive(spec.run_id) == "train"
        set_silence(server, 1, GONE_S)  # it was awake all the time
        server.tick()
        assert agent(server)["state"] == "gone"


def test_root_cause_of_failed_rank_is_awaited(
    server: Server,
) -> None:
    agents = [server.add_agent(name=name, pool="two") for name in ("a", "b")]
    resources = {"slots_per_trial": 2, "max_nodes": 2, "resource_pool": "two"}
    lost = RunExit(1, "rank 0 exited with code 1: rank 1 has exited (this is rank 0)")
    reported = []
    for what in ("own", "killed", "paused"):
        experiment = server.submit(resources=resources, max_restarts=0)
        (trial,) = server.trials(experiment["id"])
        run_id = server.begin(trial["id"], agents[0]).run_id
        server.post(f"/runs/{run_id}/meeting", {"address": "a", "port": 1})
        server.post(f"/runs/{run_id}/exited", msgspec.to_builtins(lost))
        assert server.run_of(trial["id"], agents[1]).action == "run"
        if what == "paused":  # a pause must not hide the error
            server.post(f"/trials/{trial['id']}/pause", {})
        if what == "own":
            end = RunExit(1, "rank 1 exited with code 1: ValueError: no", node=1)
        else:
            server.tick(60.0)
            assert server.run_of(trial["id"], agents[1]).action == "kill"
            logs = server.get(f"/trials/{trial['id']}/logs")["logs"]
            assert any("after others of its ranks have failed" in line["text"] for line in logs)
            end = RunExit(EXIT_INFRASTRUCTURE, "the run was stopped", node=1, was_stopped=True)
        server.post(f"/runs/{run_id}/exited", msgspec.to_builtins(end))
        reported.append(server.trial(trial["id"])["error"])
    assert reported == [
        "agent b: rank 1 exited with code 1: ValueError: no",
        f"agent a: {lost.reason}",
        f"agent a: {lost.reason}",
    ]
    experiment = server.submit(resources=resources, max_restarts=0)
    (trial,) = server.trials(experiment["id"])
    run_id = server.begin(trial["id"], agents[0]).run_id
    server.post(f"/trials/{trial['id']}/pause", {})
    server.tick(3601.0)
    assert server.run_of(trial["id"], agents[0]).action == "kill"
    server.post(f"/runs/{run_id}/exited", msgspec.to_builtins(lost))  # the kill has done that
    server.post(f"/runs/{run_id}/exited", msgspec.to_builtins(end))
    final = server.trial(trial["id"])
    assert (final["state"], final["restarts"], final["error"]) == ("PAUSED", 0, None)


def start_on_two_hosts(server: Server) -> int:
    for number in (1, 2):
        server.add_agent(name=f"agent-{number}", pool="two", host=f"worker-{number}")
    resources = {"slots_per_trial": 2, "max_nodes": 2, "resource_pool": "two"}
    experiment = server.submit(resources=resources)
    (trial,) = server.trials(experiment["id"])
    return int(trial["id"])


def test_run_has_names_of_its_hosts(server: Server) -> None:
    trial_id = start_on_two_hosts(server)
    assert server.begin(trial_id).host_names == ("worker-1", "worker-2")


def test_log_lines_have_their_host(server: Server) -> None:
    trial_id = start_on_two_hosts(server)
    run_id = server.begin(trial_id).run_id
    for node in (0, 1):
        entry = {"text": f"line of node {node}", "time": 1.0, "rank": node}
        server.post(f"/runs/{run_id}/logs", {"first": 0, "entries": [entry], "node": node})
    lines = server.get(f"/trials/{trial_id}/logs")["logs"]
    assert [(line["text"], line["host"]) for line in lines if line["stream"] != "server"] == [
        ("line of node 0", "worker-1"),
        ("line of node 1", "worker-2"),
    ]


LOAD: dict[str, Any] = {
    "cpu_percent": 12.5,
    "cores": 4,
    "memory_bytes": 3_000,
    "memory_total_bytes": 8_000,
    "disk_bytes": 10,
    "disk_total_bytes": 20,
    "slots": [
        {"id": 0, "cpu_percent": 97.5, "memory_bytes": 2_000},
        {"id": 1, "gpu_percent": 30.0, "gpu_memory_bytes": 5, "gpu_memory_total_bytes": 9},
        {"id": 7, "cpu_percent": 1.0},
    ],
}


def test_slots_have_run_and_load(sqlite_server: Server) -> None:
    server = sqlite_server
    agent_id = add_named_agent(server, "a", 3)
    server.submit(name="digits")
    add_user(server, "ann", "member")
    work = f"/agents/{agent_id}/work?wait_s=0"
    assert len(server.post(work, LOAD)["runs"]) == 1
    item = agent(server, agent_id)
    assert item["load"] == {key: value for key, value in LOAD.items() if key != "slots"}
    held, gpu, free = item["slots"]
    use = [held[key] for key in ("experiment_id", "experiment", "trial_id", "owner")]
    assert use == [1, "digits", 1, "admin"]
    assert (held["load"]["cpu_percent"], held["load"]["gpu_percent"]) == (97.5, None)
    assert (gpu["run_id"], gpu["experiment"], gpu["load"]["gpu_percent"]) == (None, None, 30)
    assert free["load"] is None
    lines = server.http.get("/metrics").text.splitlines()
    assert {line for line in lines if line.startswith(("zerolab_agent_", "zerolab_slot_"))} == {
        'zerolab_agent_cpu_percent{agent="a"} 12.5',
        'zerolab_agent_memory_bytes{agent="a"} 3000',
        'zerolab_agent_disk_bytes{agent="a"} 10',
        'zerolab_slot_cpu_percent{agent="a",slot="0"} 97.5',
        'zerolab_slot_memory_bytes{agent="a",slot="0"} 2000',
        'zerolab_slot_gpu_percent{agent="a",slot="1"} 30.0',
        'zerolab_slot_gpu_memory_bytes{agent="a",slot="1"} 5',
    }
    server.work(agent_id)  # a request without measurements keeps the last ones
    loads = server.services.orchestrator.agents.loads
    assert agent(server, agent_id)["load"] is not None
    loads[agent_id] = loads[agent_id][0] - 61, loads[agent_id][1]
    item = agent(server, agent_id)
    assert (item["load"], item["slots"][0]["load"]) == (None, None)


def test_load_history_has_means_of_minutes() -> None:
    history = LoadHistory()

    def measure(at_s: float, *slots: SlotLoad) -> None:
        history.add(1, AgentLoad(0, 1, 1, 1, 1, 1, list(slots)), 60 * 1000 + at_s)

    def latest(slot: int, at_s: float, number: int) -> list[float | None]:
        return history.hour(1, slot, 60 * 1000 + at_s)[1][-number:]

    assert latest(0, 0, 60) == []
    measure(0, SlotLoad(1, gpu_percent=30, cpu_percent=99), SlotLoad(0, cpu_percent=100))
    measure(20, SlotLoad(1, gpu_percent=50, cpu_percent=99))  # slot 0 is free: it is not reported
    measure(70)  # the GPU could not be read
    measure(185, SlotLoad(1, gpu_percent=0))
    assert latest(0, 190, 4) == [50.0, 0.0, None, 0.0]
    assert latest(1, 190, 4) == [40.0, None, None, 0.0]
    assert (history.hour(1, 0, 60_000)[0], history.hour(1, 1, 60_000)[0]) == (False, True)
    assert latest(1, 3600, 60)[:3] == [None, None, 0.0]
    measure(200, SlotLoad(1, cpu_percent=70))  # it no longer reports its utilization
    assert latest(1, 200, 4) == [0.0, 0.0, None, 35.0]
    for minute in range(100, 300):
        measure(60 * minute, SlotLoad(0, cpu_percent=minute))
    assert latest(0, 60 * 299, 60) == list(map(float, range(240, 300)))
    assert list(history.slots[1]) == [0]  # slot 1 was not measured for an hour
    assert latest(0, 60 * 360, 60) == []


def test_load_history_by_rest(sqlite_server: Server) -> None:
    server = sqlite_server
    assert server.get("/agents/load-history") == {"history": []}
    agent_id = add_named_agent(server, "a", 3)
    server.post(f"/agents/{agent_id}/work?wait_s=0", LOAD)
    held, gpu = server.get("/agents/load-history")["history"]  # the agent has no slot 7
    assert held == {
        "agent_id": agent_id, "slot": 0, "gpu": False, "percent": [*[None] * 59, 97.5],
    }  # fmt: skip
    assert (gpu["slot"], gpu["gpu"], gpu["percent"]) == (1, True, [*[None] * 59, 30.0])
    server.services.orchestrator.agents.forget(agent_id)
    assert server.get("/agents/load-history") == {"history": []}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cpu_percent": -1}, "cpu_percent"),
        ({"cores": None}, "cores"),
        ({"slots": [{"id": -1}]}, "slots"),
        ({"memory_bytes": 2**60}, "memory_bytes"),
    ],
)
def test_invalid_load_is_rejected(
    sqlite_server: Server, change: dict[str, Any], problem: str
) -> None:
    agent_id = add_named_agent(sqlite_server, "a")
    path = f"{PREFIX}/agents/{agent_id}/work?wait_s=0"
    response = sqlite_server.http.post(path, json=LOAD | change)
    assert (response.status_code, problem in response.text) == (422, True), response.text
    assert agent(sqlite_server, agent_id)["load"] is None
