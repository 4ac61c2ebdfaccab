"""Users, roles, owners and API tokens: every route for every kind of caller."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tests.server.access.test_security import all_routes, signed_in
from tests.server.helpers import Server, checkpoint, serve, validation
from zeroserver.access.guard import Guard
from zeroserver.access.routes import ACCESS, PUBLIC, RANKS, Access
from zeroserver.errors import BusyError
from zeroserver.extensions.users.passwords import PasswordCheck
from zeroserver.extensions.users.service import AuditRetention, LastUse
from zeroserver.settings import Limits
from zeroserver.store.user_directory import digest_of

PREFIX = "/api/v1"
ORIGIN = {"Origin": "http://127.0.0.1"}
ANYBODY = {"POST /login-links", "POST /logout", "POST /experiments/preview", "POST /views"}
"""Routes that are no GET and that viewers may use."""
OF_MEMBERS = {"POST /experiments", "POST /import", "POST /models", "POST /checkpoints/remove",
              "POST /experiments/{experiment_id}/fork", "POST /trials/{trial_id}/fork",
              "POST /external-runs", "POST /projects", "POST /shares", "POST /quota-requests",
              "POST /experiments/{experiment_id}/comments"}  # fmt: skip
"""Routes without an owner that create something, or check owners in the body."""
OWN_ACCOUNT = {"GET /users/{user}/tokens", "POST /users/{user}/tokens",
               "DELETE /users/{user}/tokens/{token_id}", "PUT /users/{user}/password"}  # fmt: skip
HIDDEN = {"GET /experiments/{experiment_id}/archive"}
"""Routes that read and need the owner."""
OWN_VIEWS = {"PATCH /views/{view_id}", "DELETE /views/{view_id}"}
"""Routes of what viewers may own, too."""
OF_ALL_LINKS = {"GET /whoami", "GET /shared", "GET /experiments/columns"}
"""Routes for every share link."""
OF_THE_LINK = {
    "GET /experiments/{experiment_id}", "GET /experiments/{experiment_id}/trials",
    "GET /experiments/{experiment_id}/events", "GET /experiments/{experiment_id}/columns",
    "GET /experiments/{experiment_id}/importance", "GET /experiments/{experiment_id}/searcher",
    "GET /experiments/{experiment_id}/search-progress",
    "GET /experiments/{experiment_id}/metrics/export",
    "GET /trials/{trial_id}", "GET /trials/{trial_id}/metric-names",
    "GET /trials/{trial_id}/metrics", "GET /trials/{trial_id}/media",
    "GET /trials/{trial_id}/media/names", "GET /trials/{trial_id}/media/{digest}",
}  # fmt: skip
"""Routes for a share link that shows the experiment in the path."""


def add_user(server: Server, name: str, role: str, expires_s: float | None = None) -> str:
    """Create a user; return a token."""
    server.post("/users", {"name": name, "role": role})
    return new_token(server, name, expires_s)


def new_token(server: Server, name: str, expires_s: float | None = None) -> str:
    secret: str = server.post(f"/users/{name}/tokens", {"expires_s": expires_s})["secret"]
    return secret


def ask(server: Server, token: str, method: str, path: str, **content: Any) -> httpx.Response:
    """Send a request with a token."""
    headers = {"Authorization": f"Bearer {token}"}
    response: httpx.Response = server.http.request(
        method, PREFIX + path, headers=headers, **content
    )
    return response


def new_link(server: Server, *experiments: int, **body: Any) -> str:
    """Create a share link; return its token."""
    url: str = server.post("/shares", {"experiments": list(experiments), **body})["url"]
    return url.removeprefix("/#/shared/")


def session_of(server: Server, token: str) -> dict[str, str]:
    """Sign a browser in with a token's link; return its headers."""
    own = server.http.headers["Authorization"]
    server.http.headers["Authorization"] = f"Bearer {token}"
    try:
        return {"Cookie": signed_in(server), "Authorization": "", **ORIGIN}
    finally:
        server.http.headers["Authorization"] = own


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    """A server with all users, and what ann owns: an experiment, a checkpoint, a model, ..."""
    with serve(tmp_path_factory.mktemp("team")) as server:
        tokens = {"admin": server.token} | {
            name: add_user(server, name, role)
            for name, role in (
                ("ann", "member"), ("bob", "member"), ("vic", "viewer"), ("eve", "admin"),
                ("old", "member"),
            )
        }  # fmt: skip
        admin = server.http.headers["Authorization"]
        server.http.headers["Authorization"] = f"Bearer {tokens['ann']}"
        server.submit()
        server.post("/models", {"name": "digits"})
        server.post("/projects", {"name": "vision"})
        server.post("/views", {"name": "mine", "path": "/"})
        server.post("/experiments/1/comments", {"text": "good"})
        links = [new_link(server, 1)]
        server.http.headers["Authorization"] = admin
        server.add_agent()
        server.report(server.begin().run_id, validation(10, 1.0), checkpoint(10))
        server.request("PATCH", "/users/old", json={"active": False})
        server.submit()
        links += [new_link(server, 2), new_link(server, 1)]
        server.http.delete(f"{PREFIX}/shares/3")
        tokens |= dict(zip(("link", "link of 2", "revoked link"), links, strict=True))
        yield server, tokens


def expected(route: str, access: Access, caller: str) -> bool:
    """Return whether a caller may use a route, by rules that do not depend on the access table."""
    method, _, path = route.partition(" ")
    short = f"{method} {path.removeprefix(PREFIX)}"
    if caller in INVALID or not path.startswith(("/api", "/metrics", "/mlflow", "/proxy")):
        return access == PUBLIC
    if caller in {"link", "link of 2"}:
        of_link = short in OF_ALL_LINKS or (short in OF_THE_LINK and caller == "link")
        return of_link or access == PUBLIC
    if caller in {"eve", "admin"}:
        return True
    if path.startswith("/proxy/"):  # a task executes code: reading needs its owner, too
        return caller == "ann"
    if path.startswith("/mlflow/"):  # its routes check the owner of the run in the body
        return caller != "vic" or access.role == "viewer"
    if (
        re.search(r"/((external-)?runs|agents)/\{\w+\}/|/token|/agent-token", path)
        or short == "POST /agents"
    ):
        return short in OWN_ACCOUNT | {"GET /trials/{trial_id}/runs"} and caller == "ann"
    if short in ANYBODY:
        return True
    if route == "POST /login":
        return True
    if short in OWN_ACCOUNT | HIDDEN | OWN_VIEWS:
        return caller == "ann"
    if short == "GET /audit":
        return False
    if method == "GET":
        return True
    if caller == "vic":
        return False
    is_shared = re.search(
        r"/(pools|quotas|quota-requests|agents|users|defaults|notification-ch)", path
    )
    return short in OF_MEMBERS or (caller == "ann" and not is_shared)


INVALID = {"old", "revoked link"}
"""Callers whose token is not valid."""


async def _answer(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _no_record(*_: object) -> None: ...


def test_every_route_for_every_user(team: tuple[Server, dict[str, str]]) -> None:
    """Send a request to the guard for each route of the access table, as each user."""
    server, tokens = team
    services = server.services
    uuid = checkpoint(10).uuid
    names = {"experiment_id": "1", "trial_id": "1", "uuid": uuid, "name": "digits", "user": "ann",
             "project": "vision", "token_id": "1", "run_id": "1", "agent_id": "1",
             "action": "pause", "kind": "pool", "name:path": "default",
             "version": "1", "alias": "best", "digest": "0" * 64,
             "share_id": "1", "view_id": "1", "comment_id": "1",
             "model_id": "m-1", "request_id": "1", "tag_key": "k", "path:path": "x"}  # fmt: skip
    guard = Guard(
        _answer, services.keys, services.settings, server.app.router.routes,
        has_ended=services.open_runs.has_ended, ownership=services.ownership,
        record=_no_record, times=services.request_times,
    )  # fmt: skip
    browsers = {
        name: session_of(server, token)
        if "link" not in name
        else {"Cookie": f"{services.keys.share_cookie}={token}", **ORIGIN}
        for name, token in tokens.items()
        if name != "old"
    }
    wrong, count = [], 0

    async def send_all() -> None:
        nonlocal count
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for route, access in ACCESS.items():
                method, _, path = route.partition(" ")
                path += "/x.js" * (path == "/assets")
                path = re.sub(r"\{([^}]*)\}", lambda match: names[match[1]], path)
                for caller, token in tokens.items():
                    for kind in ("token", "browser"):
                        if caller == "old" and kind == "browser":
                            continue
                        headers = (
                            {"Authorization": f"Bearer {token}", **ORIGIN}
                            if kind == "token"
                            else {name: text for name, text in browsers[caller].items() if text}
                        )
                        allowed = expected(route, access, caller)
                        if kind == "browser" and "user" in access.callers and "link" not in caller:
                            allowed = allowed and "browser" in access.callers
                        status = (await client.request(method, path, headers=headers)).status_code
                        denied = 401 if caller in INVALID else 403
                        count += 1
                        if status != (299 if allowed else denied):
                            wrong.append((route, caller, kind, status))

    server.http.portal.call(send_all)  # type: ignore[union-attr]
    assert wrong == []
    assert count == len(ACCESS) * 17 > 900


def test_access_table_has_no_gap(sqlite_server: Server) -> None:
    """A route that changes a resource with an owner checks the owner, unless it is listed here."""
    for route, access in ACCESS.items():
        method, _, path = route.partition(" ")
        short = f"{method} {path.removeprefix(PREFIX)}"
        if access.owned is not None:
            assert f"{{{access.parameter}}}" in path, route
        is_owned = re.search(
            r"\{(experiment_id|trial_id|uuid|project|share_id|view_id|comment_id)\}|/models/\{name\}|/users/\{user\}/",
            path,
        )
        if method != "GET" and is_owned and short not in OF_MEMBERS:
            assert access.owned is not None, route
        assert (access.shown is not None) == (short in OF_THE_LINK), route
        links = access.shown is not None or short in OF_ALL_LINKS or access == PUBLIC
        assert ("share" in access.callers) == links, route
        is_free = (
            short in ANYBODY | OWN_VIEWS | OWN_ACCOUNT | {"POST /login", "POST /login/share"}
            or "/runs/" in path
        )
        is_free = is_free or (path.startswith("/mlflow/") and path.endswith("/search"))
        if method != "GET" and not is_free:
            assert RANKS[access.role] > RANKS["viewer"], route
    served = {
        f"{method} {route.path}"  # type: ignore[attr-defined]
        for route in all_routes(sqlite_server)
        for method in sorted((getattr(route, "methods", None) or {"GET"}) - {"HEAD"})
    }
    assert served | {"GET /assets"} == ACCESS.keys()


def test_members_change_only_what_they_own(server: Server) -> None:
    ann, bob = (add_user(server, name, "member") for name in ("ann", "bob"))
    vic = add_user(server, "vic", "viewer")
    server.submit()
    fork = ask(server, ann, "POST", "/experiments/1/fork").json()["experiment"]
    assert (fork["owner"], fork["forked_from"]) == ("ann", 1)
    assert server.experiment(1)["owner"] == "admin"
    server.add_agent()
    server.report(server.begin(1).run_id, validation(10, 1.0), checkpoint(10))
    uuid = checkpoint(10).uuid
    changes: list[tuple[str, str, Any]] = [
        ("PATCH", "/experiments/2", {"notes": "x"}), ("POST", "/experiments/2/pause", None),
        ("POST", "/trials/2/pause", None), ("PATCH", "/jobs/2", {"priority": 1}),
    ]  # fmt: skip
    for method, path, body in changes:
        refused = ask(server, bob, method, path, json=body)
        assert refused.status_code == 403, path
        assert "belongs to ann; only ann or an administrator" in refused.json()["error"]["message"]
        viewed = ask(server, vic, method, path, json=body)
        assert "has the role viewer, but this needs the role member" in viewed.text
    assert server.experiment(2)["state"] == "ACTIVE"
    for method, path, body in changes:
        assert ask(server, ann, method, path, json=body).is_success, path
    for path in (f"/checkpoints/{uuid}", f"/checkpoints/{uuid[:8]}"):
        assert ask(server, ann, "DELETE", path).status_code == 403
    removal = {"uuids": [uuid[:8]]}
    assert ask(server, ann, "POST", "/checkpoints/remove", json=removal).status_code == 403
    preview = ask(server, ann, "POST", "/checkpoints/remove", json=removal | {"dry_run": True})
    assert preview.status_code == 409  # its trial needs it; a preview has no owner
    assert server.get(f"/checkpoints/{uuid}")["checkpoint"]["state"] == "COMPLETED"
    listed = ask(server, vic, "GET", "/experiments", params={"user": "ann"}).json()["experiments"]
    assert [item["id"] for item in listed] == [2]
    unknown = ask(server, vic, "GET", "/experiments", params={"user": "nobody"})
    assert (unknown.status_code, "zerolab user list" in unknown.text) == (422, True)
    assert ask(server, ann, "DELETE", "/experiments/77").status_code == 404


def test_model_belongs_to_creator(server: Server) -> None:
    ann, bob = (add_user(server, name, "member") for name in ("ann", "bob"))
    assert ask(server, ann, "POST", "/models", json={"name": "digits"}).status_code == 201
    assert ask(server, bob, "GET", "/models/digits").json()["model"]["owner"] == "ann"
    assert ask(server, bob, "DELETE", "/models/digits").status_code == 403
    vic, alias = add_user(server, "vic", "viewer"), "/models/digits/aliases/best"
    statuses = [
        ask(server, token, "PUT", alias, json={"version": 1}).status_code
        for token in (vic, bob, ann)
    ]
    assert statuses == [403, 403, 404]  # the model has no version
    of_version = "/models/digits/versions/1/aliases"
    statuses = [
        ask(server, token, "PUT", of_version, json={"aliases": []}).status_code
        for token in (vic, bob, ann)
    ]
    assert statuses == [403, 403, 404]
    assert ask(server, vic, "DELETE", alias).status_code == 403
    assert ask(server, ann, "DELETE", "/models/digits").status_code == 204


def test_fork_never_uses_secrets_of_others(sqlite_server: Server) -> None:
    server = sqlite_server
    ann, bob = (add_user(server, name, "member") for name in ("ann", "bob"))
    admin = server.http.headers["Authorization"]
    server.http.headers["Authorization"] = f"Bearer {ann}"
    server.submit(environment={"environment_variables": ["HF_TOKEN=hush-1"]})
    server.http.headers["Authorization"] = admin
    for path in ("/experiments/1/fork", "/trials/1/fork"):
        refused = ask(server, bob, "POST", path, json={"config": {"entrypoint": "env"}})
        assert refused.status_code == 403
        assert "its configuration contains secrets" in refused.json()["error"]["message"]
        assert "hush" not in refused.text
    assert ask(server, bob, "GET", "/experiments/1/archive").status_code == 403
    assert ask(server, ann, "POST", "/experiments/1/fork").status_code == 201
    for path in ("/experiments/1", "/experiments", "/experiments/1/submitted", "/trials/1/engine"):
        assert "hush" not in ask(server, bob, "GET", path).text


def test_token_is_stored_as_hash_and_shown_once(server: Server) -> None:
    secret = add_user(server, "ann", "member", 3600.0)
    assert secret.startswith("zlu_")
    assert len(secret) > 40
    assert server.sql("SELECT digest FROM tokens") == [(digest_of(secret),)]
    listed = server.http.get(f"{PREFIX}/users/ann/tokens")
    assert secret not in listed.text
    assert digest_of(secret) not in listed.text
    (token,) = listed.json()["tokens"]
    assert token["last_used_at"] is None
    assert ask(server, secret, "GET", "/whoami").json() == {
        "user": "ann", "role": "member", "kind": "token", "expires_at": token["expires_at"],
        "shared": True,
    }  # fmt: skip
    used = server.get("/users/ann/tokens")["tokens"][0]["last_used_at"]
    assert used is not None
    server.http.portal.call(LastUse(server.services).tick)  # type: ignore[union-attr]
    assert server.sql("SELECT last_used_at FROM tokens")[0][0] > 0
    assert server.get("/users/ann/tokens")["tokens"][0]["last_used_at"] == used


def test_revoked_token_is_refused_at_once(server: Server) -> None:
    secret = add_user(server, "ann", "member")
    other = new_token(server, "ann")
    browser = session_of(server, secret)
    unused = ask(server, secret, "POST", "/login-links").json()["url"]
    assert server.http.get(f"{PREFIX}/info", headers=browser).status_code == 200
    first, second = (token["id"] for token in server.get("/users/ann/tokens")["tokens"])
    assert ask(server, other, "DELETE", f"/users/ann/tokens/{first}").status_code == 204
    assert ask(server, secret, "GET", "/info").status_code == 401
    assert server.http.get(f"{PREFIX}/info", headers=browser).status_code == 401
    opened = server.http.get(unused, follow_redirects=False)
    cookie = str(opened.headers["Set-Cookie"]).partition(";")[0]
    server.http.cookies.clear()
    late = server.http.get(f"{PREFIX}/info", headers={"Cookie": cookie, "Authorization": ""})
    assert late.status_code == 401
    assert ask(server, other, "GET", "/info").status_code == 200
    assert ask(server, other, "DELETE", f"/users/ann/tokens/{first}").status_code == 404
    assert second


def test_deactivated_user_is_refused_at_once(server: Server) -> None:
    secret = add_user(server, "ann", "admin")
    browser = session_of(server, secret)
    assert server.request("PATCH", "/users/ann", json={"active": False})["user"]["active"] is False
    assert ask(server, secret, "GET", "/info").status_code == 401
    assert server.http.get(f"{PREFIX}/info", headers=browser).status_code == 401
    refused = server.http.post(f"{PREFIX}/users/ann/tokens", json={})
    assert (refused.status_code, "user activate ann" in refused.text) == (409, True)
    server.request("PATCH", "/users/ann", json={"active": True})
    assert ask(server, secret, "GET", "/info").status_code == 401
    assert server.http.get(f"{PREFIX}/info", headers=browser).status_code == 401
    assert ask(server, new_token(server, "ann"), "GET", "/info").status_code == 200


def test_role_change_applies_to_open_sessions(sqlite_server: Server) -> None:
    server = sqlite_server
    browser = session_of(server, add_user(server, "ann", "admin"))
    body = {"policy": "fifo"}
    assert server.http.put(f"{PREFIX}/pools/a", json=body, headers=browser).status_code == 200
    server.request("PATCH", "/users/ann", json={"role": "viewer"})
    assert server.http.put(f"{PREFIX}/pools/a", json=body, headers=browser).status_code == 403


def test_expired_token_is_refused(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server = sqlite_server
    secret = add_user(server, "ann", "member", 100.0)
    browser = session_of(server, secret)
    assert ask(server, secret, "GET", "/info").status_code == 200
    longer = ask(server, secret, "POST", "/users/ann/tokens", json={"expires_s": 101})
    endless = ask(server, secret, "POST", "/users/ann/tokens", json={})
    shorter = ask(server, secret, "POST", "/users/ann/tokens", json={"expires_s": 10})
    assert [item.status_code for item in (longer, endless, shorter)] == [403, 403, 201]
    import time

    later = time.time() + 101
    monkeypatch.setattr("zeroserver.store.user_directory.time.time", lambda: later)
    assert ask(server, secret, "GET", "/info").status_code == 401
    assert server.http.get(f"{PREFIX}/info", headers=browser).status_code == 401
    new_token(server, "ann")
    assert len(server.get("/users/ann/tokens")["tokens"]) == 1  # expired ones are removed


def test_member_cannot_escalate(sqlite_server: Server) -> None:
    server = sqlite_server
    ann, vic = add_user(server, "ann", "member"), add_user(server, "vic", "viewer")
    browser = session_of(server, ann)
    for token in (ann, vic):
        for method, path, body in (
            ("POST", "/users", {"name": "me2", "role": "admin"}),
            ("PATCH", "/users/ann", {"role": "admin"}), ("PATCH", "/users/vic", {"role": "admin"}),
            ("POST", "/users/admin/tokens", {}), ("GET", "/users/admin/tokens", None),
            ("DELETE", "/users/admin/tokens/1", None), ("GET", "/agent-token", None),
            ("POST", "/token", None), ("POST", "/agents", {}), ("PUT", "/quotas/pool/a", {}),
        ):  # fmt: skip
            assert ask(server, token, method, path, json=body).status_code == 403, path
    for path in ("/users/ann/tokens", "/token"):  # browser sessions create no credentials
        assert server.http.post(PREFIX + path, headers=browser).status_code == 403
    tokens = f"{PREFIX}/users/ann/tokens/1"
    evil = browser | {"Origin": "http://evil.example"}
    assert server.http.delete(tokens, headers=evil).status_code == 403
    assert [user["role"] for user in server.get("/users")["users"]] == ["admin", "member", "viewer"]


def test_member_cannot_run_code_on_the_server(sqlite_server: Server) -> None:
    server = sqlite_server
    ann = add_user(server, "ann", "member")
    searcher = {"name": "custom", "metric": "loss", "entrypoint": "model_def:Trial",
                "max_length": 10}  # fmt: skip
    admin = server.http.headers["Authorization"]
    server.http.headers["Authorization"] = f"Bearer {ann}"
    refused = server.try_submit(searcher=searcher)
    assert "unless an administrator submits" in refused.text, refused.text
    server.submit()
    changed = server.http.post(
        f"{PREFIX}/experiments/1/fork", json={"config": {"searcher": searcher}}
    )
    assert "unless an administrator submits" in changed.text
    server.http.headers["Authorization"] = admin
    assert "unless an administrator" not in server.try_submit(searcher=searcher).text


def test_first_administrator_stays(sqlite_server: Server) -> None:
    server = sqlite_server
    for change in ({"role": "member"}, {"active": False}):
        refused = server.http.patch(f"{PREFIX}/users/admin", json=change)
        assert (refused.status_code, "token of the installation" in refused.text) == (409, True)


@pytest.mark.parametrize("name", ["", "Ann", "a b", "-a", "../x", "x" * 65, "a\n", "ann'--"])
def test_user_name_is_checked(sqlite_server: Server, name: str) -> None:
    response = sqlite_server.http.post(f"{PREFIX}/users", json={"name": name, "role": "member"})
    assert response.status_code == 422


def test_single_user_sees_no_owner(sqlite_server: Server) -> None:
    assert sqlite_server.submit()["owner"] is None
    assert sqlite_server.get("/whoami")["shared"] is False


def test_logout_with_token_ends_own_sessions_only(sqlite_server: Server) -> None:
    server = sqlite_server
    ann = add_user(server, "ann", "member")
    of_ann, of_admin = session_of(server, ann), session_of(server, server.token)
    assert ask(server, ann, "POST", "/logout").status_code == 204
    codes = [
        server.http.get(f"{PREFIX}/info", headers=headers).status_code
        for headers in (of_ann, of_admin)
    ]
    assert codes == [401, 200]


def test_changes_of_users_are_recorded(server: Server) -> None:
    ann = add_user(server, "ann", "member")
    server.submit()
    server.add_agent()
    server.report(server.begin().run_id, validation(10, 1.0))
    ask(server, ann, "POST", "/experiments/1/fork", json={"config": {"name": "hush-1"}})
    ask(server, ann, "POST", "/experiments/1/kill")  # refused
    ask(server, ann, "POST", "/experiments/2/kill")
    ask(server, ann, "GET", "/experiments/2")
    server.request("PUT", "/users/ann/password", json={"password": "correct horse battery"})
    assert sign_in(server, "ann", "correct horse battery").status_code == 204
    changes = server.get("/audit")["changes"]
    assert [(change["user"], change["token_id"], change["action"]) for change in changes] == [
        ("ann", 0, "POST /login"),
        ("admin", 0, "PUT /users/ann/password"),
        ("ann", 1, "POST /experiments/2/kill"),
        ("ann", 1, "POST /experiments/1/fork"),
        ("admin", 0, "POST /experiments"),
        ("admin", 0, "POST /users/ann/tokens"),
        ("admin", 0, "POST /users"),
    ]
    assert "hush" not in str(changes)
    assert "battery" not in str(changes)
    page = server.get("/audit", user="ann", limit=2)
    assert [change["id"] for change in page["changes"]] == [7, 5]
    older = server.get("/audit", user="ann", limit=2, after=page["next_after"])
    assert (len(older["changes"]), older["next_after"]) == (1, None)


@pytest.mark.parametrize(("days", "kept"), [(None, [2, 1]), (365, [2])])
def test_audit_days_delete_old_changes(tmp_path: Path, days: int | None, kept: list[int]) -> None:
    with serve(tmp_path, limits=Limits(audit_days=days)) as server:
        server.post("/users", {"name": "ann", "role": "member"})
        server.clock.now += 364 * 86400.0
        server.post("/users", {"name": "vic", "role": "member"})
        server.clock.now += 2 * 86400.0
        server.http.portal.call(AuditRetention(server.services).tick)  # type: ignore[union-attr]
        assert [row["id"] for row in server.get("/audit")["changes"]] == kept


def sign_in(server: Server, user: str, password: str, **headers: str) -> httpx.Response:
    """Sign in on the page; the browser gets no cookie."""
    body = {"user": user, "password": password}
    response = server.http.post("/login", json=body, headers=ORIGIN | headers)
    server.http.cookies.clear()
    return response  # type: ignore[no-any-return]


def test_password_signs_a_browser_in(server: Server) -> None:
    add_user(server, "ann", "member")
    old = session_of(server, new_token(server, "ann"))
    path, password = "/users/ann/password", "correct horse battery"
    server.request("PUT", path, json={"password": password})
    assert server.http.get(f"{PREFIX}/info", headers=old).status_code == 401
    ((stored,),) = server.sql("SELECT password FROM users WHERE name = 'ann'")
    assert stored.startswith("$argon2id$")
    assert stored not in server.http.get(f"{PREFIX}/users").text
    response = sign_in(server, "ann", password)
    assert (response.status_code, "HttpOnly" in response.headers["Set-Cookie"]) == (204, True)
    cookie = {"Cookie": response.headers["Set-Cookie"].partition(";")[0], "Authorization": ""}
    assert server.http.get(f"{PREFIX}/whoami", headers=cookie).json()["user"] == "ann"
    assert sign_in(server, "ann", password, Origin="http://evil.example").status_code == 403
    unknown, wrong = (sign_in(server, name, "x" * 12) for name in ("nobody", "ann"))
    assert unknown.status_code == wrong.status_code == 403
    assert unknown.json() == wrong.json()
    short = server.http.put(PREFIX + path, json={"password": "short"})
    assert (short.status_code, "short" in short.text) == (422, False)
    server.request("PATCH", "/users/ann", json={"active": False})
    assert sign_in(server, "ann", password).status_code == 403


def test_password_change_needs_the_current_one(sqlite_server: Server) -> None:
    server = sqlite_server
    expiring = add_user(server, "ann", "member", 3600.0)
    path, first, second = "/users/ann/password", "correct horse battery", "another long one"
    assert ask(server, expiring, "PUT", path, json={"password": first}).status_code == 403
    assert ask(server, new_token(server, "ann"), "PUT", path, json={"password": first}).is_success
    body = {"password": second, "current_password": first}
    assert (
        ask(server, expiring, "PUT", path, json=body | {"current_password": "x"}).status_code == 403
    )
    assert ask(server, expiring, "PUT", path, json=body).status_code == 204
    assert [sign_in(server, "ann", word).status_code for word in (first, second)] == [403, 204]
    assert ask(server, expiring, "PUT", "/users/admin/password", json=body).status_code == 403


def test_wrong_passwords_are_slowed_down(sqlite_server: Server) -> None:
    codes = [sign_in(sqlite_server, "admin", f"wrong {n}").status_code for n in range(7)]
    assert codes == [403] * 5 + [429] * 2


def test_users_and_tokens_survive_restart(tmp_path: Any) -> None:
    with serve(tmp_path) as server:
        secret = add_user(server, "ann", "member")
        browser = session_of(server, secret)
    with serve(tmp_path) as server:
        assert ask(server, secret, "GET", "/whoami").json()["user"] == "ann"
        assert server.http.get(f"{PREFIX}/whoami", headers=browser).json()["user"] == "ann"


def test_parallel_passwords_count_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attempts that arrive together after a wait, only one is checked."""
    now = [0.0]
    monkeypatch.setattr("zeroserver.extensions.users.passwords.time.monotonic", lambda: now[0])
    check = PasswordCheck()
    for _ in range(5):
        assert not check.verify("ann", None, "wrong")
    now[0] = 100.0

    def attempt(_: int) -> str:
        try:
            return str(check.verify("ann", None, "wrong"))
        except BusyError as error:
            return str(error)[:24]

    with ThreadPoolExecutor(4) as threads:
        results = sorted(threads.map(attempt, range(4)))
    assert results == ["False", *["too many wrong passwords"] * 3]


def test_unchecked_passwords_do_not_count() -> None:
    """Others keep the server busy: the right password works as soon as they are done."""
    check = PasswordCheck()
    stored = check.hash("right")

    def attempt(_: int) -> str:
        with pytest.raises(BusyError) as error:
            check.verify("ann", stored, "right")
        return str(error.value)

    with check._slot(), check._slot(), ThreadPoolExecutor(6) as threads:
        assert set(threads.map(attempt, range(6))) == {"too many sign-ins at once; try again"}
    assert check.verify("ann", stored, "right")


def test_token_of_another_run_is_refused_without_a_role(sqlite_server: Server) -> None:
    token = sqlite_server.services.keys.run_token(1)
    refused = ask(sqlite_server, token, "GET", "/runs/2/directive")
    assert (refused.status_code, "role" in refused.text) == (403, False)
