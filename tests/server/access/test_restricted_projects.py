"""Projects that only their members see: every route, for members and others."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.access.test_users import add_user, ask
from tests.server.conftest import new_database
from tests.server.helpers import Server, checkpoint, metrics, serve, validation
from zeroserver.access.routes import ACCESS, PUBLIC, resources_of

PREFIX = "/api/v1"
MARK = "topsecret"
"""Part of every text that belongs to the restricted project."""
QUERIES = {
    "GET /api/v1/experiments/{experiment_id}/file": {"name": "model_def.py"},
    "GET /api/v1/checkpoints/{uuid}/file": {"name": "x"},
    "GET /api/v1/experiments/groups": {"by": "label"},
}
"""Queries of routes that require one."""
NAMES_ONLY = {"GET /api/v1/experiments/columns"}
"""Routes that list names of metrics of the whole installation, without their values."""


@pytest.fixture(
    scope="module",
    params=["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)],
)
def secret(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, dict[str, str], str]]:
    """A server with an experiment, a checkpoint and a model of ann in a restricted project."""
    url = ""
    if request.param == "postgresql":
        url = new_database(request.getfixturevalue("postgresql"))
    with serve(tmp_path_factory.mktemp("secret"), url) as server:
        tokens = {
            name: add_user(server, name, role)
            for name, role in (
                ("ann", "member"), ("bob", "member"), ("vic", "viewer"), ("eve", "admin"),
            )
        }  # fmt: skip
        own = server.http.headers["Authorization"]
        server.http.headers["Authorization"] = f"Bearer {tokens['ann']}"
        server.post("/projects", {"name": MARK, "description": MARK})
        server.submit(name=MARK, project=MARK, labels=[MARK])
        server.post("/models", {"name": MARK, "project": MARK})
        server.post("/experiments/1/comments", {"text": MARK})
        server.http.headers["Authorization"] = own
        server.add_agent()
        item = server.begin()
        server.report(
            item.run_id, metrics("training", 5, loss=2.0), validation(10, 1.0), checkpoint(10)
        )
        server.log(item.run_id, 0, MARK)
        server.request("PUT", f"/quotas/project/{MARK}", json={"max_slots": 4})
        server.post("/projects", {"name": "open"})
        server.request("PUT", f"/projects/{MARK}/members/vic")
        server.request("PATCH", f"/projects/{MARK}", json={"restricted": True})
        yield server, tokens, checkpoint(10).uuid


def test_every_route_hides_a_restricted_project(
    secret: tuple[Server, dict[str, str], str],
) -> None:
    """Send a request for each route as a user who is no member, and read all responses."""
    server, tokens, uuid = secret
    names = {"experiment_id": "1", "trial_id": "1", "uuid": uuid, "name": MARK, "project": MARK,
             "user": "bob", "action": "pause", "kind": "project", "name:path": MARK,
             "version": "1", "alias": "best", "digest": "0" * 64, "token_id": "1", "run_id": "1",
             "agent_id": "1"}  # fmt: skip
    wrong, count = [], 0
    for route, access in ACCESS.items():
        method, _, path = route.partition(" ")
        is_stream = path.endswith("/events")
        if route == "GET /api/v1/shared":
            continue  # for callers with a share link
        if access == PUBLIC or not path.startswith(PREFIX) or "user" not in access.callers:
            continue
        of_project = bool(resources_of(route))
        if access.role == "admin" or (method != "GET" and not of_project):
            continue
        filled = re.sub(r"\{([^}]*)\}", lambda match: names.get(match[1], "1"), path)
        if is_stream and not of_project:
            continue  # test_events_of_a_restricted_project_are_hidden
        body = {} if method == "GET" else {"json": {}}
        response = ask(
            server, tokens["bob"], method, filled.removeprefix(PREFIX),
            params=QUERIES.get(route, {}), **body,
        )  # fmt: skip
        count += 1
        expected = {404} if of_project else {200, 404} if "{" in path else {200}
        shown = MARK in response.text.replace(f"there is no project {MARK};", "").replace(
            f"there is no model {MARK};", ""
        )
        if response.status_code not in expected or (shown and route not in NAMES_ONLY):
            wrong.append((route, response.status_code, response.text[:200]))
    assert wrong == []
    assert count > 40


def test_missing_and_hidden_look_alike(secret: tuple[Server, dict[str, str], str]) -> None:
    server, tokens, uuid = secret
    for hidden, missing in (
        ("/experiments/1", "/experiments/77"), ("/trials/1", "/trials/77"),
        (f"/checkpoints/{uuid}", f"/checkpoints/{'1' * 8}-{uuid[9:]}"),
        (f"/projects/{MARK}", "/projects/nothing"), (f"/models/{MARK}", "/models/nothing"),
    ):  # fmt: skip
        pair = [ask(server, tokens["bob"], "GET", path) for path in (hidden, missing)]
        assert [item.status_code for item in pair] == [404, 404], hidden
        texts = [
            item.json()["error"]["message"].replace(path.split("/")[-1], "")
            for item, path in zip(pair, (hidden, missing), strict=True)
        ]
        assert texts[0] == texts[1]


def test_members_and_administrators_see_it(secret: tuple[Server, dict[str, str], str]) -> None:
    server, tokens, uuid = secret
    for name in ("ann", "vic", "eve"):
        token = tokens[name]
        for path in ("/experiments/1", "/trials/1", f"/checkpoints/{uuid}", f"/models/{MARK}"):
            assert ask(server, token, "GET", path).status_code == 200, (name, path)
        assert ask(server, token, "GET", "/info").json()["projects"] == 3
        assert MARK in ask(server, token, "GET", "/experiments").text
        assert MARK in ask(server, token, "GET", "/quotas").text
    assert ask(server, tokens["bob"], "GET", "/info").json()["projects"] == 2
    members = ask(server, tokens["vic"], "GET", f"/projects/{MARK}/members").json()["members"]
    assert members == [{"user": "ann", "owner": True}, {"user": "vic", "owner": False}]


def test_others_cannot_use_a_restricted_project(
    secret: tuple[Server, dict[str, str], str],
) -> None:
    """Names and ids in bodies are checked as those in paths."""
    server, tokens, uuid = secret
    own = server.http.headers["Authorization"]
    server.http.headers["Authorization"] = f"Bearer {tokens['bob']}"
    try:
        experiment_id = server.submit()["id"]
        server.post("/models", {"name": "of-bob"})
        searcher = {"name": "single", "metric": "loss", "max_length": 20}
        refused: list[httpx.Response] = [
            server.try_submit(project=MARK),
            server.try_submit(searcher={**searcher, "source_trial_id": 1}),
            server.try_submit(searcher={**searcher, "source_checkpoint_uuid": uuid}),
            server.http.patch(f"{PREFIX}/experiments/{experiment_id}", json={"project": MARK}),
            server.http.post(f"{PREFIX}/models", json={"name": "m", "project": MARK}),
            server.http.post(f"{PREFIX}/models/of-bob/versions", json={"checkpoint": uuid}),
            server.http.get(f"{PREFIX}/experiments", params={"project": MARK}),
            server.http.get(f"{PREFIX}/defaults", params={"project": MARK}),
            server.http.post(f"{PREFIX}/checkpoints/remove", json={"uuids": [uuid]}),
            server.http.post(f"{PREFIX}/jobs/{experiment_id}/move", json={"ahead_of": 1}),
        ]
    finally:
        server.http.headers["Authorization"] = own
    assert [item.status_code for item in refused] == [422] * 7 + [404] * 3, [
        item.text for item in refused
    ]
    assert "must be one of default, open, got" in refused[0].text
    assert "which does not exist" in refused[1].text
    assert server.get(f"/checkpoints/{uuid}")["checkpoint"]["state"] == "COMPLETED"


def test_mlflow_hides_a_restricted_project(secret: tuple[Server, dict[str, str], str]) -> None:
    server, tokens, _ = secret
    api = "/mlflow/api/2.0/mlflow"

    def call(user: str, path: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {tokens[user]}"}
        response: httpx.Response = server.http.post(api + path, json=body, headers=headers)
        return response

    home = call("ann", "/experiments/create", name=MARK, tags=[{"key": "a", "value": MARK}]).json()
    for user, shown in (("bob", False), ("vic", True), ("eve", True)):
        headers = {"Authorization": f"Bearer {tokens[user]}"}
        texts = [call(user, "/experiments/search", max_results=10).text]
        for path, query in (
            ("get", home), ("get-by-name", {"experiment_name": MARK}),
        ):  # fmt: skip
            url = f"{api}/experiments/{path}"
            texts.append(server.http.get(url, params=query, headers=headers).text)
        query = {"experiment": home["experiment_id"]}
        texts.append(server.http.get("/mlflow/links", params=query, headers=headers).text)
        texts = [text.replace(f"'{MARK}'", "").replace(f"={MARK} ", "") for text in texts]
        assert [MARK in text for text in texts] == [shown] * 4, texts
    assert call("bob", "/runs/create", **home).status_code == 404
    created = call("ann", "/runs/create", experiment_id="0", run_name=MARK).json()["run"]
    run_id = created["info"]["run_id"]
    number = next(
        item["id"] for item in server.get("/experiments")["experiments"] if item["id"] > 1
        and item["owner"] == "ann"
    )  # fmt: skip
    assert MARK in call("bob", "/runs/search", experiment_ids=["0"]).text
    server.request("PATCH", f"/experiments/{number}", json={"project": MARK})
    assert MARK not in call("bob", "/runs/search", experiment_ids=["0"]).text
    assert MARK in call("vic", "/runs/search", experiment_ids=["0"]).text
    for path, body in (
        ("/runs/log-metric", {"key": "a", "value": 1.0, "timestamp": 0}),
        ("/runs/set-tag", {"key": "a", "value": "b"}),
        ("/runs/update", {"run_name": "x"}),
    ):
        refused = call("bob", path, run_id=run_id, **body)
        assert refused.status_code in {403, 404}, path
        assert MARK not in refused.text


def test_events_of_a_restricted_project_are_hidden(
    secret: tuple[Server, dict[str, str], str],
) -> None:
    server, tokens, _ = secret
    from zeroserver.api.events import _load
    from zeroserver.event_journal import ALL, Entry
    from zeroserver.visibility import EVERYTHING, hiding

    directory = server.services.orchestrator.projects
    bob = server.services.orchestrator.users.find("bob")
    assert bob is not None
    entries = [Entry(1, 1, "experiment", 1), Entry(2, 1, "trial", 1)]

    async def load(hidden: frozenset[int]) -> str:
        with hiding(hidden):
            return str(await _load(server.services, entries, ALL))

    portal = server.http.portal
    assert portal is not None
    text = portal.call(load, directory.hidden_from(bob.id))
    assert MARK not in text
    assert "deleted" in text
    assert MARK in portal.call(load, EVERYTHING)
    assert tokens


def test_members_change_at_once(sqlite_server: Server) -> None:
    server = sqlite_server
    ann, bob = (add_user(server, name, "member") for name in ("ann", "bob"))
    ask(server, ann, "POST", "/projects", json={"name": "vision"})
    path = "/projects/vision"

    def status(token: str) -> int:
        return ask(server, token, "GET", path).status_code

    assert status(bob) == 200
    revision = server.services.orchestrator.users.revision
    ask(server, ann, "PATCH", path, json={"restricted": True})
    assert server.services.orchestrator.users.revision > revision  # event streams end
    assert (status(ann), status(bob)) == (200, 404)
    assert ask(server, ann, "PUT", f"{path}/members/bob").status_code == 204
    assert status(bob) == 200
    assert ask(server, bob, "PUT", f"{path}/members/bob").status_code == 403
    assert ask(server, ann, "DELETE", f"{path}/members/bob").status_code == 204
    assert status(bob) == 404
    for refused, code, text in (
        (ask(server, ann, "DELETE", f"{path}/members/bob"), 404, "project members vision"),
        (ask(server, ann, "DELETE", f"{path}/members/ann"), 409, "always a member"),
        (ask(server, ann, "PUT", f"{path}/members/nobody"), 422, "zerolab user list"),
    ):
        assert (refused.status_code, text in refused.text) == (code, True), refused.text
    default = server.http.patch(f"{PREFIX}/projects/default", json={"restricted": True})
    assert (default.status_code, "cannot be restricted" in default.text) == (409, True)


def test_members_survive_restart(tmp_path: Any) -> None:
    with serve(tmp_path) as server:
        ann, bob = (add_user(server, name, "member") for name in ("ann", "bob"))
        server.post("/projects", {"name": "vision"})
        server.request("PUT", "/projects/vision/members/ann")
        server.request("PATCH", "/projects/vision", json={"restricted": True})
    with serve(tmp_path) as server:
        codes = [ask(server, token, "GET", "/projects/vision").status_code for token in (ann, bob)]
        assert codes == [200, 404]
