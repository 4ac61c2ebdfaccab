"""Share links, saved views and comments."""

from pathlib import Path
from typing import Any

import pytest
from starlette.concurrency import run_in_threadpool

from tests.server.access.test_users import PREFIX, add_user, ask, new_link, new_token, session_of
from tests.server.helpers import Server, checkpoint, metrics, serve, training, validation
from zeroserver.access.principal import OWNER, Principal
from zeroserver.api.events import _text
from zeroserver.store.user_directory import digest_of

ORIGIN = {"Origin": "http://127.0.0.1"}


def as_user(server: Server, token: str, method: str, path: str, **content: Any) -> Any:
    """Send a request as another user, and return the body."""
    response = ask(server, token, method, path, **content)
    assert response.is_success, response.text
    return response.json() if response.content else None


def test_link_shows_its_experiment_and_no_other(server: Server) -> None:
    for name in ("shown", "hidden"):
        variables = ["HF_TOKEN=hush-1"]
        server.submit(name=name, environment={"environment_variables": variables})
    server.add_agent(2)
    hidden_metric = metrics("validation", 10, loss=2.0, hidden=3.0)
    server.report(server.begin(1).run_id, validation(10, 1.0), checkpoint(10))
    server.report(server.begin(2).run_id, hidden_metric)
    link = new_link(server, 1)
    columns = as_user(server, link, "GET", "/experiments/columns?column=last.validation.loss")
    assert columns["columns"] == {"id": [1], "last.validation.loss": [1.0]}
    absent, unknown = (
        ask(server, link, "GET", f"/experiments/columns?column=last.validation.{name}")
        for name in ("hidden", "absent")
    )
    assert absent.status_code == 422
    assert absent.text.replace("hidden", "absent") == unknown.text
    shown = as_user(server, link, "GET", "/shared")
    assert ([item["name"] for item in shown["experiments"]], shown["path"]) == (
        ["shown"],
        "/experiments/1",
    )
    assert as_user(server, link, "GET", "/whoami")["kind"] == "share"
    texts = [
        ask(server, link, "GET", path).text
        for path in (
            "/shared", "/experiments/columns", "/experiments/1", "/experiments/1/trials",
            "/experiments/1/columns",
            "/experiments/1/metrics/export", "/trials/1", "/trials/1/metric-names",
            "/trials/1/metrics", "/trials/1/media/names", "/experiments/1/searcher",
        )
    ]  # fmt: skip
    assert '"loss"' in "".join(texts)
    assert all("hush" not in text and "hidden" not in text for text in texts)
    uuid = checkpoint(10).uuid
    for path in ("/experiments/2", "/trials/2", "/experiments/77", "/trials/77", "/experiments/01"):
        refused = ask(server, link, "GET", path)
        assert refused.status_code == 403 or path.endswith("01"), path
    missing, foreign = (ask(server, link, "GET", f"/trials/{n}").json() for n in (77, 2))
    assert str(missing).replace("77", "2") == str(foreign)  # tells nothing about others
    for path in (
        "/experiments", "/events",
        "/experiments/1/logs", "/trials/1/logs", "/experiments/1/submitted",
        "/experiments/1/file?path=model_def.py", "/experiments/1/checkpoints",
        f"/checkpoints/{uuid}/file?path=weights", f"/checkpoints/{uuid}/archive",
        "/trials/1/engine", "/trials/1/runs", "/users",
        "/experiments/1/comments", "/views", "/shares", "/openapi.json", "/nothing",
    ):  # fmt: skip
        refused = ask(server, link, "GET", path)
        assert (refused.status_code, "sign in as a user" in refused.text) == (403, True), path
    for method in ("PATCH", "DELETE"):
        assert ask(server, link, method, "/experiments/1", json={"notes": "x"}).status_code == 403


def test_link_hides_logs_in_events(sqlite_server: Server) -> None:
    """The stream of an experiment contains neither log lines nor checkpoints, and ends."""
    server = sqlite_server
    server.submit()
    server.add_agent()
    run_id = server.begin().run_id
    new_link(server, 1)
    services = server.services
    link = Principal("share", share_id=1, experiment_ids=frozenset({1}))

    async def follow() -> str:
        streams = [_text(services, caller, 1, None) for caller in (OWNER, link)]
        for stream in streams:
            text = b""
            while b"reload" not in text.rpartition(b"event: log")[2]:
                text += await anext(stream)
        await run_in_threadpool(server.log, run_id, 0, "hush-1")
        await run_in_threadpool(server.report, run_id, checkpoint(1), training(1, 1.0))
        for stream in streams:
            text = b""
            while b"event: metric" not in text:
                text += await anext(stream)
            assert (b"hush" in text and b"event: checkpoint" in text) == (stream is streams[0])
        await run_in_threadpool(server.http.delete, f"{PREFIX}/shares/1")
        await run_in_threadpool(server.report, run_id, training(2, 1.0))
        async for part in streams[1]:
            text += part
        await streams[0].aclose()
        return text.decode()

    text = server.http.portal.call(follow)  # type: ignore[union-attr]
    assert "hush" not in text
    assert "uuid" not in text


def test_link_needs_own_experiments(server: Server) -> None:
    ann, vic = add_user(server, "ann", "member"), add_user(server, "vic", "viewer")
    server.submit()
    body = {"experiments": [1]}
    refused = ask(server, ann, "POST", "/shares", json=body)
    assert (refused.status_code, "belongs to admin" in refused.text) == (403, True)
    assert ask(server, vic, "POST", "/shares", json=body).status_code == 403
    fork = as_user(server, ann, "POST", "/experiments/1/fork")["experiment"]["id"]
    mixed = ask(server, ann, "POST", "/shares", json={"experiments": [fork, 1]})
    assert mixed.status_code == 403
    as_user(server, ann, "POST", "/shares", json={"experiments": [fork]})
    new_link(server, 1, name="of admin")
    assert ask(server, ann, "POST", "/shares", json={"experiments": [77]}).status_code == 404
    assert [share["owner"] for share in as_user(server, ann, "GET", "/shares")["shares"]] == ["ann"]
    listed = server.get("/shares")["shares"]
    assert [share["owner"] for share in listed] == ["admin", "ann"]
    assert ask(server, ann, "DELETE", f"/shares/{listed[0]['id']}").status_code == 403
    assert server.get("/shares", experiment=fork)["shares"] == listed[1:]


@pytest.mark.parametrize(
    "body",
    [
        {"experiments": []}, {"experiments": [1], "expires_s": 0}, {"experiments": [1] * 101},
        {"experiments": [1], "expires_s": 400 * 86400}, {"experiments": [1], "expires_s": None},
        {"experiments": [1], "path": "javascript:alert(1)"}, {"experiments": [1], "path": "//x y"},
        {"experiments": [1], "path": "/?a=" + "x" * 4000}, {"experiments": ["1; DROP"]},
    ],
)  # fmt: skip
def test_invalid_link_is_refused(sqlite_server: Server, body: dict[str, Any]) -> None:
    sqlite_server.submit()
    assert sqlite_server.http.post(f"{PREFIX}/shares", json=body).status_code == 422


def test_link_is_opened_with_a_cookie(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    link = new_link(server, 1, path="/experiments/1/trials?sort=id")
    stranger = {"Authorization": "", **ORIGIN}
    opened = server.http.post("/login/share", json={"token": link}, headers=stranger)
    assert opened.json() == {"path": "/experiments/1/trials?sort=id"}
    cookie = opened.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    server.http.cookies.clear()
    reader = {"Cookie": cookie.partition(";")[0], "Authorization": ""}
    assert server.http.get(f"{PREFIX}/experiments/1", headers=reader).status_code == 200
    assert server.http.get(f"{PREFIX}/experiments", headers=reader).status_code == 403
    evil = server.http.post(
        "/login/share", json={"token": link}, headers=stranger | {"Origin": "http://evil.example"}
    )
    assert evil.status_code == 403
    # The cookie of a link accepts no other token: a user's would need no Origin then.
    other = {"Cookie": f"{server.services.keys.share_cookie}={server.token}", "Authorization": ""}
    assert server.http.get(f"{PREFIX}/info", headers=other).status_code == 401


def test_revoked_and_expired_links_are_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = add_user(server, "ann", "member")
    server.submit()
    fork = as_user(server, ann, "POST", "/experiments/1/fork")["experiment"]["id"]
    revoked, expired = new_link(server, 1), new_link(server, 1, expires_s=100)
    of_ann = as_user(server, ann, "POST", "/shares", json={"experiments": [fork]})["url"]
    of_ann = of_ann.removeprefix("/#/shared/")
    assert ask(server, revoked, "GET", "/experiments/1").status_code == 200
    assert ask(server, of_ann, "GET", f"/experiments/{fork}").status_code == 200
    assert server.http.delete(f"{PREFIX}/shares/1").status_code == 204
    assert server.http.delete(f"{PREFIX}/shares/1").status_code == 404
    server.request("PATCH", "/users/ann", json={"active": False})
    import time

    later = time.time() + 101
    monkeypatch.setattr("zeroserver.store.user_directory.time.time", lambda: later)
    for link in (revoked, expired, of_ann, revoked[:-1], "zls_", "zls_x"):
        refused = ask(server, link, "GET", "/experiments/1")
        assert (refused.status_code, "expired or was revoked" in refused.text) == (401, True)
        late = server.http.post("/login/share", json={"token": link}, headers=ORIGIN)
        assert (late.status_code, "ask for a new one" in late.text) == (404, True)
        assert link not in late.text + refused.text or len(link) < 6
    assert [share["valid"] for share in server.get("/shares")["shares"]] == [False, False]


def test_link_token_is_stored_as_hash_and_survives_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(tmp_path) as server:
        server.submit()
        link = new_link(server, 1)
        server.http.post("/login/share", json={"token": link, "x": 1}, headers=ORIGIN)
        assert server.sql("SELECT digest FROM shares") == [(digest_of(link),)]
        assert link not in server.http.get(f"{PREFIX}/shares").text
        assert link not in str(server.get("/audit"))
    with serve(tmp_path) as server:
        assert ask(server, link, "GET", "/experiments/1").status_code == 200
    assert link not in caplog.text
    assert all(
        link.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()
    )


def test_views_belong_to_users(server: Server) -> None:
    ann, vic = add_user(server, "ann", "member"), add_user(server, "vic", "viewer")
    path = "/?find=digits&group=user"
    body = {"name": "my digits", "path": path}
    view = as_user(server, vic, "POST", "/views", json=body)["view"]
    assert (view["owner"], view["path"], view["shared"]) == ("vic", path, False)
    assert ask(server, vic, "POST", "/views", json=body).status_code == 409
    as_user(server, ann, "POST", "/views", json=body | {"name": "a b", "shared": True})
    names = {
        name: [view["name"] for view in as_user(server, token, "GET", "/views")["views"]]
        for name, token in (("ann", ann), ("vic", vic), ("admin", server.token))
    }
    assert names == {"ann": ["a b"], "vic": ["a b", "my digits"], "admin": ["a b"]}
    one = f"/views/{view['id']}"
    assert ask(server, ann, "PATCH", one, json={"name": "x"}).status_code == 403
    changed = as_user(server, vic, "PATCH", one, json={"name": "x", "path": "/compare/1,2"})["view"]
    assert (changed["name"], changed["path"]) == ("x", "/compare/1,2")
    as_user(server, vic, "PATCH", one, json={"shared": True})
    as_user(server, vic, "POST", "/views", json=body)
    assert ask(server, vic, "PATCH", one, json={"name": "my digits"}).status_code == 409
    for wrong in ({"name": ""}, {"path": "https://evil.example"}, {"path": "/<script>"}, {"x": 1}):
        assert ask(server, vic, "PATCH", one, json=wrong).status_code == 422, wrong
    assert ask(server, ann, "DELETE", one).status_code == 403
    as_user(server, vic, "DELETE", one)
    assert ask(server, vic, "DELETE", one).status_code == 404
    assert ask(server, vic, "PATCH", one, json={"name": "y"}).status_code == 404


def test_comments_are_changed_by_their_author(server: Server) -> None:
    ann, bob = (add_user(server, name, "member") for name in ("ann", "bob"))
    vic = add_user(server, "vic", "viewer")
    server.submit()
    path = "/experiments/1/comments"
    text = "lr too high?\n<b>no markup</b>"
    comment = as_user(server, ann, "POST", path, json={"text": text})["comment"]
    assert (comment["author"], comment["text"], comment["edited_at"]) == ("ann", text, None)
    second = as_user(server, bob, "POST", path, json={"text": "yes"})["comment"]
    assert ask(server, vic, "POST", path, json={"text": "me too"}).status_code == 403
    assert [item["author"] for item in as_user(server, vic, "GET", path)["comments"]] == [
        "ann",
        "bob",
    ]
    page = server.get(path, limit=1)
    assert server.get(path, after=page["next_after"])["comments"] == [second]
    for wrong in ("", "  \n", "a\x00b", "x" * 10_001):
        assert ask(server, ann, "POST", path, json={"text": wrong}).status_code == 422
    assert (
        ask(server, ann, "POST", "/experiments/7/comments", json={"text": "x"}).status_code == 404
    )
    one = f"/comments/{comment['id']}"
    assert ask(server, bob, "PATCH", one, json={"text": "x"}).status_code == 403
    by_admin = server.http.patch(PREFIX + one, json={"text": "x"})
    assert (by_admin.status_code, "only its author" in by_admin.text) == (403, True)
    edited = as_user(server, ann, "PATCH", one, json={"text": "fixed"})["comment"]
    assert (edited["text"], edited["edited_at"] is not None) == ("fixed", True)
    assert ask(server, bob, "DELETE", one).status_code == 403
    as_user(server, ann, "DELETE", one)
    assert ask(server, ann, "DELETE", one).status_code == 404
    server.post("/experiments/1/kill")
    assert server.http.delete(f"{PREFIX}/experiments/1").status_code == 204
    assert server.sql("SELECT count(*) FROM comments") == [(0,)]


def test_link_ends_with_the_access_of_its_creator(server: Server) -> None:
    """A link to a restricted project shows nothing once its creator is no member."""
    ann = add_user(server, "ann", "member")
    server.post("/projects", {"name": "vision"})
    as_user(server, ann, "POST", "/projects", json={"name": "own"})
    server.submit()
    fork = as_user(server, ann, "POST", "/experiments/1/fork")["experiment"]["id"]
    kept = as_user(server, ann, "POST", "/experiments/1/fork")["experiment"]["id"]
    server.request("PATCH", f"/experiments/{fork}", json={"project": "vision"})
    body = {"experiments": [fork, kept]}
    link = as_user(server, ann, "POST", "/shares", json=body)["url"].removeprefix("/#/shared/")
    of_admin = new_link(server, fork)
    server.request("PUT", "/projects/vision/members/ann")
    server.request("PATCH", "/projects/vision", json={"restricted": True})
    trial = server.trials(fork)[0]["id"]

    def shown(token: str) -> tuple[int, ...]:
        return tuple(
            ask(server, token, "GET", path).status_code
            for path in (f"/experiments/{fork}", f"/trials/{trial}", f"/experiments/{fork}/trials")
        )

    assert shown(link) == shown(of_admin) == (200, 200, 200)
    server.request("DELETE", "/projects/vision/members/ann")
    assert shown(link) == (403, 403, 403)
    assert shown(of_admin) == (200, 200, 200)
    hidden, missing = (ask(server, link, "GET", f"/experiments/{n}").text for n in (fork, 77))
    assert hidden == missing.replace("77", str(fork))
    assert [item["id"] for item in as_user(server, link, "GET", "/shared")["experiments"]] == [kept]
    assert ask(server, link, "GET", f"/experiments/{kept}").status_code == 200
    server.request("PUT", "/projects/vision/members/ann")
    assert shown(link) == (200, 200, 200)


def test_session_and_expiring_token_create_no_lasting_link(sqlite_server: Server) -> None:
    server = sqlite_server
    ann = add_user(server, "ann", "member")
    short = new_token(server, "ann", 3600)
    as_user(server, ann, "POST", "/projects", json={"name": "own"})
    server.submit()
    fork = as_user(server, ann, "POST", "/experiments/1/fork")["experiment"]["id"]
    browser = session_of(server, ann)
    day = 86400

    def create(headers: dict[str, str], seconds: float) -> int:
        body = {"experiments": [fork], "expires_s": seconds}
        status: int = server.http.post(f"{PREFIX}/shares", json=body, headers=headers).status_code
        return status

    bearer, expiring = ({"Authorization": f"Bearer {token}"} for token in (ann, short))
    assert [create(browser, days * day) for days in (30, 31, 366)] == [201, 403, 403]
    assert [create(expiring, seconds) for seconds in (3000, 7 * day)] == [201, 403]
    assert [create(session_of(server, short), seconds) for seconds in (3000, day)] == [201, 403]
    assert create(bearer, 366 * day) == 201
