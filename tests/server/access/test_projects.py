"""Projects: creation, membership of experiments and models, and archived ones."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.access.test_users import add_user, ask
from tests.server.helpers import Server, serve

PREFIX = "/api/v1"


def names(server: Server, **filters: Any) -> list[int]:
    return [item["id"] for item in server.get("/experiments", **filters)["experiments"]]


def test_single_project_is_not_shown(sqlite_server: Server) -> None:
    server = sqlite_server
    assert server.submit()["project"] is None
    assert server.post("/models", {"name": "digits"})["model"]["project"] is None
    (project,) = server.get("/projects")["projects"]
    assert (project["name"], project["experiments"], project["models"]) == ("default", 1, 1)
    assert project["owner"] is None


def test_experiment_belongs_to_its_project(server: Server) -> None:
    created = server.post("/projects", {"name": "vision", "description": "Images"})["project"]
    assert (created["experiments"], created["last_experiment_at"]) == (0, None)
    assert server.submit()["project"] == "default"
    assert server.submit(project="vision")["project"] == "vision"
    assert server.experiment(2)["config"]["project"] == "vision"
    assert (names(server, project="vision"), names(server, project="default")) == ([2], [1])
    server.act("kill", 2)
    vision = server.get("/projects/vision")["project"]
    assert (vision["experiments"], vision["unfinished"]) == (1, 0)
    assert vision["last_experiment_at"] is not None
    assert server.get("/projects/default")["project"]["unfinished"] == 1


def test_model_belongs_to_its_project(server: Server) -> None:
    server.post("/projects", {"name": "vision"})
    model = server.post("/models", {"name": "digits", "project": "vision"})["model"]
    assert model["project"] == "vision"
    assert server.post("/models", {"name": "words"})["model"]["project"] == "default"
    listed = server.get("/models", project="vision")["models"]
    assert [item["name"] for item in listed] == ["digits"]
    unknown = server.http.post(f"{PREFIX}/models", json={"name": "x", "project": "audio"})
    assert (unknown.status_code, "project: must be one of" in unknown.text) == (422, True)


def test_unknown_project_is_named_with_command(sqlite_server: Server) -> None:
    server = sqlite_server
    for response in (
        server.try_submit(project="vision"),
        server.http.post(
            f"{PREFIX}/import",
            params={"project": "vision"},
            content=b'{"kind":"header","format":1,"time":1,"config":{},"hparams":{},"trial_seed":1}',
        ),
    ):
        assert response.status_code == 422, response.text
        message = response.json()["error"]["message"]
        assert "project: must be one of default, got 'vision'" in message
        assert "zerolab project create vision" in message
    assert server.get("/experiments")["experiments"] == []
    assert server.http.get(f"{PREFIX}/experiments", params={"project": "x"}).status_code == 422
    assert server.http.get(f"{PREFIX}/projects/x").status_code == 404


def test_moved_experiment_and_its_forks(server: Server) -> None:
    server.post("/projects", {"name": "vision"})
    server.submit()
    moved = server.request("PATCH", "/experiments/1", json={"project": "vision"})["experiment"]
    assert moved["project"] == "vision"
    assert server.post("/experiments/1/fork", {})["experiment"]["project"] == "vision"
    changed = {"config": {"project": "default"}}
    assert server.post("/experiments/1/fork", changed)["experiment"]["project"] == "default"
    refused = server.http.patch(f"{PREFIX}/experiments/1", json={"project": "audio"})
    assert refused.status_code == 422
    assert server.experiment(1)["project"] == "vision"


def test_archived_project_refuses_new_content(server: Server) -> None:
    server.post("/projects", {"name": "vision"})
    server.submit(project="vision")
    server.submit()
    archived = server.request("PATCH", "/projects/vision", json={"archived": True})
    assert archived["project"]["archived"] is True
    responses = [
        server.try_submit(project="vision"),
        server.http.post(f"{PREFIX}/experiments/1/fork"),
        server.http.patch(f"{PREFIX}/experiments/2", json={"project": "vision"}),
        server.http.post(f"{PREFIX}/models", json={"name": "m", "project": "vision"}),
    ]
    for response in responses:
        assert response.status_code == 409, response.text
        assert "zerolab project unarchive vision" in response.json()["error"]["message"]
    assert names(server) == [2, 1]
    assert server.experiment(1)["state"] == "ACTIVE"
    assert server.request("PATCH", "/experiments/1", json={"project": "default"})
    server.request("PATCH", "/projects/vision", json={"archived": False})
    assert server.submit(project="vision")["project"] == "vision"


def test_default_project_stays(sqlite_server: Server) -> None:
    server = sqlite_server
    refused = server.http.patch(f"{PREFIX}/projects/default", json={"archived": True})
    assert (refused.status_code, "cannot be archived" in refused.text) == (409, True)
    again = server.http.post(f"{PREFIX}/projects", json={"name": "default"})
    assert again.status_code == 409


def test_project_belongs_to_creator(server: Server) -> None:
    ann, bob = (add_user(server, name, "member") for name in ("ann", "bob"))
    vic = add_user(server, "vic", "viewer")
    assert ask(server, vic, "POST", "/projects", json={"name": "vision"}).status_code == 403
    assert ask(server, ann, "POST", "/projects", json={"name": "vision"}).status_code == 201
    change = {"notes": "ask ann"}
    refused = ask(server, bob, "PATCH", "/projects/vision", json=change)
    assert (refused.status_code, "project vision belongs to ann" in refused.text) == (403, True)
    assert ask(server, ann, "PATCH", "/projects/vision", json=change).status_code == 200
    project = ask(server, vic, "GET", "/projects/vision").json()["project"]
    assert (project["owner"], project["notes"]) == ("ann", "ask ann")
    server.submit()  # belongs to the administrator
    move = {"project": "vision"}
    assert ask(server, ann, "PATCH", "/experiments/1", json=move).status_code == 403


@pytest.mark.parametrize("name", ["", "a b", "-a", "../x", "x" * 65, "a\n", "a/b"])
def test_project_name_is_checked(sqlite_server: Server, name: str) -> None:
    response = sqlite_server.http.post(f"{PREFIX}/projects", json={"name": name})
    assert response.status_code == 422
    assert sqlite_server.try_submit(project=name).status_code == 422


def test_projects_survive_restart(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        server.post("/projects", {"name": "vision"})
        server.request("PATCH", "/projects/vision", json={"notes": "n", "archived": True})
        server.submit()
    with serve(tmp_path) as server:
        assert server.experiment()["project"] == "default"
        assert server.get("/projects/vision")["project"]["notes"] == "n"
        assert server.try_submit(project="vision").status_code == 409


def test_project_quota_follows_a_move(sqlite_server: Server) -> None:
    server = sqlite_server
    server.post("/projects", {"name": "vision"})
    server.request("PUT", "/quotas/project/vision", json={"max_slots": 0})
    server.add_agent()
    assert "quota project:vision" in server.submit(project="vision")["waiting_reason"]
    server.request("PATCH", "/experiments/1", json={"project": "default"})
    assert server.experiment()["waiting_reason"] is None
    unknown = server.http.put(f"{PREFIX}/quotas/project/audio", json={"max_slots": 1})
    assert (unknown.status_code, "must be one of default, vision" in unknown.text) == (422, True)


def test_continued_experiment_stays_in_its_project(sqlite_server: Server) -> None:
    server = sqlite_server
    server.post("/projects", {"name": "vision"})
    server.submit()
    server.act("kill", 1)
    body = {"config": {"project": "vision", "searcher": {"max_length": {"batches": 999}}}}
    refused = server.http.post(f"{PREFIX}/experiments/1/continue", json=body)
    assert (refused.status_code, "zerolab project move 1 vision" in refused.text) == (422, True)
