"""Defaults of new experiments, and limits that administrators enforce."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.access.test_users import add_user, ask
from tests.server.helpers import Server, checkpoint, serve

PREFIX = "/api/v1"


def put(server: Server, config: Any, project: str | None = None, **limits: Any) -> Any:
    params = {"project": project} if project else {}
    body = {"config": config, "limits": limits}
    return server.request("PUT", "/defaults", json=body, params=params)["defaults"]


def raw_config(server: Server, experiment_id: int) -> dict[str, Any]:
    query = f"SELECT raw_config FROM experiments WHERE id = {experiment_id}"
    return dict(msgspec.json.decode(server.sql(query)[0][0]))


def error_of(response: Any) -> str:
    assert response.status_code == 422, response.text
    return str(response.json()["error"]["message"])


def test_defaults_are_below_the_submission(server: Server) -> None:
    server.post("/projects", {"name": "vision"})
    variables = ["HF_HOME=/data/hf", "OMP_NUM_THREADS=2"]
    put(
        server,
        {"max_restarts": 1, "resources": {"priority": 50, "weight": 2},
         "environment": {"environment_variables": variables}},
    )  # fmt: skip
    put(server, {"max_restarts": 2, "retention_policy": {"log_retention_days": 7}}, "vision")
    changes = {
        "resources": {"slots_per_trial": 1, "weight": 3},
        "environment": {"environment_variables": {"cpu": ["OMP_NUM_THREADS=4"]}},
    }
    config = server.submit(project="vision", **changes)["config"]
    assert config["max_restarts"] == 2
    assert config["retention_policy"]["log_retention_days"] == 7
    assert (config["resources"]["priority"], config["resources"]["weight"]) == (50, 3)
    assert config["environment"]["environment_variables"] == {
        "cpu": ["HF_HOME=/data/hf", "OMP_NUM_THREADS=4"],
        "cuda": variables,
    }
    assert raw_config(server, 1)["max_restarts"] == 2
    default = server.submit(max_restarts=0)["config"]
    assert default["max_restarts"] == 0
    assert default["retention_policy"]["log_retention_days"] is None
    assert server.request("DELETE", "/defaults", params={"project": "vision"}) is None
    again = server.post("/experiments/1/fork", {})["experiment"]["config"]
    assert again["max_restarts"] == 2  # a fork keeps the settings of its original
    assert server.submit(project="vision", max_restarts=None)["config"]["max_restarts"] == 5


def test_storage_of_another_type_replaces_the_default(sqlite_server: Server) -> None:
    server = sqlite_server
    put(server, {"checkpoint_storage": {"type": "shared_fs", "host_path": "/mnt/a"}})
    storage = {"type": "directory", "container_path": str(server.directory)}
    stored = server.submit(checkpoint_storage=storage)["config"]["checkpoint_storage"]
    assert (stored["type"], stored["host_path"]) == ("directory", None)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"max_restart": 1}, "max_restart: unknown key; did you mean 'max_restarts'"),
        ({"searcher": {"name": "single"}}, "searcher: must not be in defaults"),
        ({"resources": {"priority": 0}}, "resources.priority: must be"),
        ({"extends": "base.yaml"}, "extends: must be merged before"),
    ],
)
def test_invalid_defaults_are_refused(sqlite_server: Server, config: Any, problem: str) -> None:
    response = sqlite_server.http.put(f"{PREFIX}/defaults", json={"config": config})
    assert problem in error_of(response)
    assert sqlite_server.get("/defaults")["defaults"]["updated_at"] is None


def test_limits_refuse_submissions(server: Server) -> None:
    server.post("/projects", {"name": "vision"})
    put(server, {}, slots_per_trial=2, max_slots=3)
    put(server, {}, "vision", priority=40)
    message = error_of(
        server.try_submit(project="vision", resources={"slots_per_trial": 4, "priority": 10})
    )
    assert (
        "resources.slots_per_trial: must be at most 2 (policy of the installation), got 4; use "
        "fewer slots, or ask an administrator"
    ) in message
    assert "resources.priority: must be at least 40 (policy of project vision), got 10" in message
    message = error_of(server.try_submit(resources={"max_slots": 4}))
    assert "resources.max_slots: must be at most 3" in message
    assert server.get("/experiments")["experiments"] == []
    resources = {"slots_per_trial": 2, "priority": 10}
    assert server.submit(resources=resources)["config"]["resources"]["max_slots"] == 3
    put(server, {}, slots_per_trial=1)
    assert "must be at most 1" in error_of(server.http.post(f"{PREFIX}/experiments/1/fork"))


def test_full_storage_refuses_experiments(server: Server) -> None:
    """Of the project with the limit, and of all projects for the installation."""
    server.post("/projects", {"name": "vision"})
    server.submit(project="vision")
    server.add_agent()
    server.report(server.begin().run_id, checkpoint(1))  # 10 bytes
    put(server, {}, "vision", storage_gb=1.1e-8)
    server.submit(project="vision")
    put(server, {}, "vision", storage_gb=1e-8)
    message = error_of(server.try_submit(project="vision"))
    assert (
        "checkpoint_storage: must be below 1e-08 GB (policy of project vision), got 10 B; delete "
        "checkpoints, or ask an administrator"
    ) in message
    assert "must be below" in error_of(server.http.post(f"{PREFIX}/experiments/1/fork"))
    server.submit()
    put(server, {}, storage_gb=1e-8)
    assert "policy of the installation" in error_of(server.try_submit())


def test_members_read_and_are_limited(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        ann = add_user(server, "ann", "member")
        bob = add_user(server, "bob", "member")
        put(server, {"environment": {"environment_variables": ["HF_TOKEN=abc"]}}, priority=40,
            max_slots=4)  # fmt: skip
        read = ask(server, ann, "GET", "/defaults")
        assert read.json()["defaults"]["limits"]["priority"] == 40
        assert "abc" not in read.text
        assert "HF_TOKEN=********" in read.text
        for method in ("PUT", "DELETE"):
            assert ask(server, ann, method, "/defaults", json={}).status_code == 403
        admin = server.http.headers["Authorization"]
        server.http.headers["Authorization"] = f"Bearer {ann}"
        server.submit()
        server.submit(resources={"priority": 60})
        server.http.headers["Authorization"] = admin
        # The secrets of the defaults are not ann's: bob may fork her experiment.
        assert ask(server, bob, "POST", "/experiments/1/fork").status_code == 201
        for body in ({"priority": 1}, {"max_slots": 5}, {"max_slots": None}):
            refused = ask(server, ann, "PATCH", "/jobs/1", json=body)
            assert "policy of the installation" in error_of(refused)
        assert server.request("PATCH", "/jobs/1", json={"priority": 1})["job"]["priority"] == 1
        refused = ask(server, ann, "POST", "/jobs/2/move", json={"ahead_of": 1})
        assert "resources.priority: must be at least 40" in error_of(refused)
        actions = [entry["action"] for entry in server.get("/audit")["changes"]]
        assert any("PUT /defaults" in action for action in actions), actions


def test_defaults_survive_a_restart(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        put(server, {"max_restarts": 1}, slots_per_trial=4)
    with serve(tmp_path) as server:
        defaults = server.get("/defaults")["defaults"]
        assert defaults["config"] == {"max_restarts": 1}
        assert defaults["limits"] == {
            "slots_per_trial": 4,
            "max_slots": None,
            "priority": None,
            "storage_gb": None,
        }
        assert server.submit()["config"]["max_restarts"] == 1
