"""Runs that no agent starts: opened, reported, resumed, lost and ended through routes."""

import hashlib
from typing import Any

import pytest

from tests.server.helpers import Server, metrics, on_sqlite, validation
from zerolab.contract.media import MediaRecord
from zeroserver.extensions.external_runs.supervisor import LOST_S, ExternalRunWatch


def open_run(server: Server, session: str = "s1", **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post(
        "/external-runs", {"id": "abc", "session": session, "name": "mine", **body}
    )
    return answer


def test_external_run_is_a_live_experiment(server: Server) -> None:
    server.add_agent()
    run = open_run(server, labels=["x"], hparams={"lr": 0.1, "api_token": "hf_secret"})
    number = run["run_id"]
    assert server.work() == []  # the scheduler does not start it
    server.tick()
    assert server.experiment()["state"] == "ACTIVE"
    assert (server.experiment()["name"], server.experiment()["labels"]) == ("mine", ["x"])
    assert server.trial()["state"] == "RUNNING"
    assert server.trial()["hparams"]["lr"] == 0.1
    assert "hf_secret" not in str(server.trial())
    token = {"Authorization": f"Bearer {run['token']}"}
    server.http.headers.update(token)
    server.report(number, metrics("training", 1, loss=0.5), validation(2, 0.25))
    server.log(number, 0, "a line")
    content = b"picture"
    digest = hashlib.sha256(content).hexdigest()
    server.request("PUT", f"/external-runs/{number}/media/{digest}", content=content)
    bad = server.http.put(f"/api/v1/external-runs/{number}/media/{'0' * 64}", content=content)
    assert bad.status_code == 422
    server.report(number, MediaRecord("p", 2, "image", digest, 7, 1.8e9, 0, ".png"))
    server.post(f"/external-runs/{number}/hparams", {"hparams": {"lr": 0.2}})
    server.post(f"/external-runs/{number}/end", {})
    server.http.headers["Authorization"] = f"Bearer {server.token}"
    server.post(f"/external-runs/{number}/end", {"error": "late"})  # has ended already
    assert server.experiment()["state"] == "COMPLETED"
    assert server.trial()["hparams"] == {"lr": 0.2}
    assert server.trial()["steps_completed"] == 2
    assert [line["text"] for line in server.get("/trials/1/logs")["logs"]] == ["a line"]
    assert server.http.get(f"/api/v1/trials/1/media/{digest}").content == content
    assert [run["state"] for run in server.get("/trials/1/runs")["runs"]] == ["EXITED"]


@on_sqlite
def test_missing_project_is_created_on_request(server: Server) -> None:
    body = {"id": "a", "session": "s", "project": "vision"}
    refused = server.http.post("/api/v1/external-runs", json=body)
    assert refused.status_code == 422
    assert "`zerolab project create vision` creates it" in refused.text
    for key in "ab":
        server.post("/external-runs", {**body, "id": key, "create_project": True})
        assert server.experiment()["project"] == "vision"
    server.request("PATCH", "/projects/vision", json={"archived": True})
    archived = {**body, "id": "c", "create_project": True}
    assert server.http.post("/api/v1/external-runs", json=archived).status_code == 409
    server.post("/external-runs", {**body, "create_project": True})  # of an existing experiment


@on_sqlite
def test_session_is_resumed_without_duplicates(server: Server) -> None:
    first = open_run(server)
    assert open_run(server)["run_id"] == first["run_id"]
    server.report(first["run_id"], metrics("training", 1, loss=0.5))
    server.post(f"/external-runs/{first['run_id']}/end", {"error": "ValueError: bad"})
    assert server.experiment()["state"] == "ERROR"
    assert server.trial()["error"] == "ValueError: bad"
    # Sent again later: the same run, which knows its records.
    assert open_run(server)["run_id"] == first["run_id"]
    assert server.experiment()["state"] == "ACTIVE"
    again = server.send(first["run_id"], 1, [metrics("training", 1, loss=9.0)])
    assert again.json() == {"stored": 1}
    # A new process of the same id continues the trial.
    busy = server.http.post("/api/v1/external-runs", json={"id": "abc", "session": "s2"})
    assert busy.status_code == 409
    assert "another process" in busy.json()["error"]["message"]
    second = open_run(server, "s2", replace=True)
    assert (second["trial_id"], second["experiment_id"]) == (1, 1)
    assert second["run_id"] != first["run_id"]
    stale = server.send(first["run_id"], 2, [metrics("training", 2, loss=0.5)])
    assert stale.status_code == 409
    server.report(second["run_id"], metrics("training", 2, loss=0.4))
    server.post(f"/external-runs/{second['run_id']}/end", {})
    assert server.experiment()["state"] == "COMPLETED"
    points = server.sql("SELECT step, value FROM points ORDER BY step")
    assert points == [(1, 0.5), (2, 0.4)]


@on_sqlite
def test_silent_external_run_is_lost(server: Server) -> None:
    run = open_run(server)
    watch = ExternalRunWatch(server.services)

    def tick(seconds: float) -> str:
        server.clock.now += seconds
        assert server.http.portal is not None
        server.http.portal.call(watch.tick)
        state: str = server.trial()["state"]
        return state

    assert tick(0.0) == "RUNNING"
    assert tick(LOST_S - 1) == "RUNNING"
    server.post(f"/external-runs/{run['run_id']}/heartbeat")
    assert tick(10.0) == "RUNNING"
    assert tick(LOST_S - 1) == "RUNNING"
    assert tick(10.0) == "ERROR"
    assert "zerolab sync" in server.trial()["error"]
    open_run(server)  # the connection is back
    assert tick(10.0) == "RUNNING"


@on_sqlite
@pytest.mark.parametrize("action", ["cancel", "kill"])
def test_user_ends_external_run(server: Server, action: str) -> None:
    run = open_run(server)
    server.act(action)
    if action == "kill":
        assert server.http.portal is not None
        server.http.portal.call(ExternalRunWatch(server.services).tick)
    else:
        assert server.directive(run["run_id"]) == "stop"
        server.post(f"/external-runs/{run['run_id']}/end", {})
    assert server.experiment()["state"] == "CANCELED"
    late = server.http.post("/api/v1/external-runs", json={"id": "abc", "session": "s1"})
    assert late.status_code == 409


@on_sqlite
@pytest.mark.parametrize(
    "change", [{"id": "../x"}, {"session": ""}, {"name": ""}, {"labels": [""]}, {"x": 1}]
)
def test_invalid_external_run_is_rejected(server: Server, change: dict[str, Any]) -> None:
    body = {"id": "abc", "session": "s1", **change}
    response = server.http.post("/api/v1/external-runs", json=body)
    assert response.status_code == 422
    assert server.get("/experiments")["experiments"] == []


@on_sqlite
@pytest.mark.parametrize("action", ["end", "hparams", "heartbeat", "media"])
def test_run_of_an_agent_is_rejected(server: Server, action: str) -> None:
    server.add_agent()
    server.submit()
    spec = server.begin()
    server.http.headers["Authorization"] = f"Bearer {spec.token}"
    path = f"/api/v1/external-runs/{spec.run_id}"
    if action == "media":
        digest = hashlib.sha256(b"x").hexdigest()
        response = server.http.put(f"{path}/media/{digest}", content=b"x")
    else:
        body = {"hparams": {"lr": 1}} if action == "hparams" else {}
        response = server.http.post(f"{path}/{action}", json=body)
    assert response.status_code == 409
    assert "managed by the scheduler" in response.json()["error"]["message"]
    server.http.headers["Authorization"] = f"Bearer {server.token}"
    assert server.trial()["state"] == "RUNNING"


@on_sqlite
def test_fork_does_not_take_the_id(server: Server) -> None:
    run = open_run(server)
    server.post("/experiments/1/fork", {"activate": False})
    assert open_run(server)["experiment_id"] == run["experiment_id"]
