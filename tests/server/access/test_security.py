"""Authentication and authorization of every route."""

import hashlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.routing import APIRoute, iter_route_contexts
from fastapi.testclient import TestClient
from starlette.routing import BaseRoute, Match, Mount, Route

from tests.server.helpers import Server, serve, training
from zerolab.contract.messages import MSGPACK, LogBatch, LogEntry, ReportBatch
from zeroserver.access.guard import open_paths
from zeroserver.access.principal import OWNER, Principal, PrincipalDep
from zeroserver.access.routes import ACCESS, RUN
from zeroserver.errors import install_error_handlers
from zeroserver.event_journal import ALL, Hub, Journal
from zeroserver.store.database import Change

CORPUS = [
    "..", "../../etc/passwd", "%2e%2e%2fetc", "..%252f..%252fetc", "#", "//proc/self/root",
    "a\\..\\b", "/etc/passwd", "x" * 300, "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}", "%00",
]  # fmt: skip


def routes(server: Server) -> Iterator[tuple[str, str]]:
    """Yield every method and path of the application, with numbers for the parameters."""
    app_routes = all_routes(server)
    assert len(app_routes) > 30
    for route in app_routes:
        assert isinstance(route, Route | APIRoute | Mount), route
        methods = getattr(route, "methods", None) or {"GET"}
        for method in sorted(methods - {"HEAD"}):
            yield method, _path(route)


def all_routes(server: Server) -> list[BaseRoute]:
    return [context.original_route for context in iter_route_contexts(server.app.routes)]


def _path(route: Route | APIRoute | Mount) -> str:
    return re.sub(r"\{[^}]*\}", "1", route.path)


def test_no_route_is_shadowed(sqlite_server: Server) -> None:
    for route in all_routes(sqlite_server):
        if isinstance(route, Mount):
            continue
        assert isinstance(route, Route | APIRoute), route
        (method,) = (route.methods or {"GET"}) - {"HEAD"}
        scope = {"type": "http", "method": method, "path": _path(route), "headers": []}
        matching = (
            candidate
            for candidate in all_routes(sqlite_server)
            if candidate.matches(scope)[0] is Match.FULL
        )
        assert next(matching) is route, (method, route.path)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic dXNlcjpwYXNz"},
        {"Authorization": "Bearer run.1.0000"},
        {"Cookie": "NAME=1.2"},
        {"Cookie": f"NAME=99999999999.ab.{'0' * 64}"},
        {"Authorization": "Bearer \u00ff"},
    ],
)
def test_every_route_outside_allowlist_needs_token(
    sqlite_server: Server, headers: dict[str, str]
) -> None:
    cookie = sqlite_server.services.keys.cookie
    headers = {name: value.replace("NAME", cookie) for name, value in headers.items()}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    del sqlite_server.http.headers["Authorization"]
    closed = 0
    for method, path in routes(sqlite_server):
        if path in open_paths() or path.startswith(("/assets", "/docs")):
            continue
        response = sqlite_server.http.request(method, path, headers=raw)
        assert response.status_code == 401, (method, path, response.status_code)
        assert response.headers["WWW-Authenticate"] == "Bearer"
        if path.startswith("/mlflow/"):  # in the form of MLflow
            assert response.json()["error_code"] == "UNAUTHENTICATED"
        else:
            assert response.json()["error"]["type"] == "unauthorized"
        closed += 1
    assert closed > 25


def test_run_token_is_valid_for_its_run_only(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    spec = server.begin()
    headers = {"Authorization": f"Bearer {spec.token}"}
    prefix = f"/api/v1/runs/{spec.run_id}/"
    for method, path in routes(server):
        external = f"/api/v1/external-runs/{spec.run_id}/"
        if path in open_paths() or path.startswith((prefix, external, "/assets", "/docs")):
            continue
        answer = server.http.request(method, path, headers=headers)
        assert answer.status_code == 403, (method, path)
    other = server.http.get("/api/v1/runs/11/directive", headers=headers)
    assert other.status_code == 403
    response = server.http.get(f"{prefix}directive", params={"wait_s": 0}, headers=headers)
    assert response.json()["action"] == "train"


def test_token_is_private_and_in_no_response(sqlite_server: Server) -> None:
    server = sqlite_server
    home = server.services.orchestrator.home
    assert home.token_file.stat().st_mode & 0o777 == 0o600
    assert home.path.stat().st_mode & 0o777 == 0o700
    assert len(server.token) >= 40
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.report(spec.run_id, training(1, 1.0))
    for path in ("/info", "/experiments", "/experiments/1/trials", "/agents", "/jobs"):
        assert server.token not in server.http.get(f"/api/v1{path}").text
    assert server.token not in str(server.work())
    assert server.sql(f"SELECT count(*) FROM runs WHERE spec LIKE '%{spec.token}%'") == [(0,)]


def test_login_link_works_once(sqlite_server: Server) -> None:
    server = sqlite_server
    link = server.post("/login-links")["url"]
    del server.http.headers["Authorization"]
    assert server.http.get("/api/v1/info").status_code == 401
    response = server.http.get(link, follow_redirects=False)
    assert (response.status_code, response.headers["Location"]) == (303, "/")
    cookie = response.headers["Set-Cookie"]
    for word in ("HttpOnly", "SameSite=strict", "Path=/"):
        assert word in cookie
    assert server.token not in cookie
    assert server.http.get("/api/v1/info").status_code == 200
    server.http.cookies.clear()
    again = server.http.get(link, follow_redirects=False)
    assert again.status_code == 403
    assert "Set-Cookie" not in again.headers
    assert server.http.get("/login?code=wrong").status_code == 403


def test_changes_from_other_origins_are_rejected(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    link = server.post("/login-links")["url"]
    del server.http.headers["Authorization"]
    server.http.get(link)
    path = "/api/v1/experiments/1/pause"
    for origin in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        assert server.http.post(path, headers=origin).status_code == 403
    assert server.http.post(path, headers={"Origin": "http://127.0.0.1"}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "code"),
    [
        ("http://127.0.0.1", 403),
        ("https://127.0.0.1:8443", 403),
        ("https://127.0.0.1", 200),
        ("https://127.0.0.1:443", 200),
        ("", 403),
        ("null", 403),
    ],
)
def test_origin_is_compared_with_its_scheme(sqlite_server: Server, origin: str, code: int) -> None:
    server = sqlite_server
    server.submit()
    cookie = signed_in(server)
    del server.http.headers["Authorization"]
    server.http.base_url = "https://127.0.0.1"
    headers = {"Cookie": cookie, "Origin": origin}
    response = server.http.post("/api/v1/experiments/1/pause", headers=headers)
    assert response.status_code == code, response.text


def test_browser_behind_a_hidden_proxy_compares_the_scheme(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    cookie = signed_in(server)
    del server.http.headers["Authorization"]
    for origin, site, code in (
        ("https://127.0.0.1", "cross-site", 403),
        ("https://evil.example", "same-origin", 403),
        ("https://127.0.0.1", "same-origin", 200),
    ):
        headers = {"Cookie": cookie, "Origin": origin, "Sec-Fetch-Site": site}
        response = server.http.post("/api/v1/experiments/1/pause", headers=headers)
        assert response.status_code == code, (origin, site)


def test_session_cookie_is_secure_behind_tls(sqlite_server: Server) -> None:
    server = sqlite_server
    for scheme in ("http", "https"):
        server.http.base_url = f"{scheme}://127.0.0.1"
        link = server.post("/login-links")["url"]
        cookie = server.http.get(link, follow_redirects=False).headers["Set-Cookie"]
        cleared = server.http.post("/api/v1/logout").headers["Set-Cookie"]
        assert [("Secure" in header) for header in (cookie, cleared)] == [scheme == "https"] * 2


def test_browser_session_creates_no_credentials(sqlite_server: Server) -> None:
    server = sqlite_server
    first = signed_in(server)
    token = server.http.headers.pop("Authorization")

    def ask(cookie: str, path: str) -> Any:
        headers = {"Cookie": cookie, "Origin": "http://127.0.0.1"}
        return server.http.post(f"/api/v1{path}", headers=headers)

    def enter(link: str) -> str:
        response = server.http.get(link, follow_redirects=False)
        server.http.cookies.clear()
        return str(response.headers["Set-Cookie"]).partition(";")[0]

    second = enter(ask(first, "/login-links").json()["url"])
    unused = ask(first, "/login-links").json()["url"]
    refused = ask(second, "/login-links")
    assert refused.status_code == 403
    assert "use `zerolab open`" in refused.json()["error"]["message"]
    for path in ("/token", "/agent-token"):
        assert ask(first, path).status_code == 403
    server.http.headers["Authorization"] = token
    assert [status(server, Cookie=session) for session in (first, second)] == [200, 200]
    server.http.headers.pop("Authorization")
    assert ask(first, "/logout").status_code == 204
    server.http.headers["Authorization"] = token
    assert [status(server, Cookie=session) for session in (first, second)] == [401, 401]
    assert server.http.get(unused).status_code == 403


def test_session_expires(sqlite_server: Server) -> None:
    keys = sqlite_server.services.keys
    keys.session_s = 100.0
    cookie = keys.redeem(keys.login_code())
    assert cookie is not None
    assert keys.identify(None, cookie).kind == "browser"
    assert keys.identify(None, f"9{cookie}").kind == "nobody"
    keys.session_s = -1.0
    assert keys.identify(None, keys.redeem(keys.login_code())).kind == "nobody"


def signed_in(server: Server) -> str:
    """Sign a browser in; return its cookie header."""
    response = server.http.get(server.post("/login-links")["url"], follow_redirects=False)
    server.http.cookies.clear()
    return str(response.headers["Set-Cookie"]).partition(";")[0]


def status(server: Server, **headers: str) -> int:
    """Return the status of a request with these headers only."""
    headers = {"Authorization": "", **headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items() if value]
    with_token = server.http.headers.pop("Authorization")
    try:
        return server.http.get("/api/v1/info", headers=raw).status_code
    finally:
        server.http.headers["Authorization"] = with_token


def test_sign_out_one_session_or_all(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        first, second, third = (signed_in(server) for _ in range(3))
        assert {status(server, Cookie=cookie) for cookie in (first, second, third)} == {200}
        headers = {"Cookie": first, "Origin": "http://127.0.0.1"}
        token = server.http.headers.pop("Authorization")
        response = server.http.post("/api/v1/logout", headers=headers)
        assert response.status_code == 204
        assert f"{server.services.keys.cookie}=" in response.headers["Set-Cookie"]
        server.http.headers["Authorization"] = token
        assert [status(server, Cookie=cookie) for cookie in (first, second, third)] == [
            401,
            200,
            200,
        ]
    with serve(tmp_path) as server:
        assert [status(server, Cookie=cookie) for cookie in (first, second)] == [401, 200]
        unused = server.post("/login-links")["url"]
        server.post("/logout")
        assert [status(server, Cookie=cookie) for cookie in (second, third)] == [401, 401]
        assert server.http.get(unused).status_code == 403
        assert server.get("/info")["version"]


def test_renewed_token_ends_sessions_but_not_runs(
    sqlite_server: Server,
) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    spec = server.begin()
    cookie = signed_in(server)
    headers = {"Cookie": cookie, "Origin": "http://127.0.0.1"}
    old = server.http.headers.pop("Authorization")
    assert server.http.post("/api/v1/token", headers=headers).status_code == 403
    server.http.headers["Authorization"] = old
    renewed = server.post("/token")["token"]
    assert renewed == server.services.orchestrator.home.read_token()
    assert status(server, Authorization=old) == 401
    assert status(server, Authorization=f"Bearer {renewed}") == 200
    assert status(server, Cookie=cookie) == 401
    server.http.headers["Authorization"] = f"Bearer {spec.token}"
    assert server.directive(spec.run_id) == "train"


def test_two_servers_on_one_host_use_separate_cookies(tmp_path: Path) -> None:
    with serve(tmp_path / "a") as first, serve(tmp_path / "b") as second:
        cookies = "; ".join(signed_in(server) for server in (first, second))
        assert [status(server, Cookie=cookies) for server in (first, second)] == [200, 200]
        name = first.services.keys.cookie
    with serve(tmp_path / "a") as again:
        assert again.services.keys.cookie == name


def test_route_receives_caller(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server, callers = sqlite_server, []

    @server.app.get("/api/v1/runs/{run_id}/probe")
    def probe(run_id: int, principal: PrincipalDep) -> None:
        callers.append(principal)

    path = "/api/v1/runs/7/probe"
    run = {"Authorization": f"Bearer {server.services.keys.run_token(7)}"}
    assert server.http.get(path, headers=run).status_code == 403  # it is not declared
    monkeypatch.setitem(ACCESS, "GET /api/v1/runs/{run_id}/probe", RUN)
    assert server.http.get(path).status_code == 200
    assert server.http.get(path, headers=run).status_code == 200
    assert server.http.get(path.replace("7", "8"), headers=run).status_code == 403
    assert callers == [OWNER, Principal("run", run_id=7)]


def test_every_route_declares_its_callers(sqlite_server: Server) -> None:
    declared = {
        f"{method} {route.path}"  # type: ignore[attr-defined]
        for route in all_routes(sqlite_server)
        for method in sorted((getattr(route, "methods", None) or {"GET"}) - {"HEAD"})
    }
    assert declared | {"GET /assets"} == ACCESS.keys()


def test_join_token_is_valid_for_agent_routes_only(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    token = server.get("/agent-token")["token"]
    home = server.services.orchestrator.home
    assert token == home.read_agent_token() != server.token
    assert home.agent_token_file.stat().st_mode & 0o777 == 0o600
    headers = {"Authorization": f"Bearer {token}"}
    allowed = set()
    for method, path in routes(server):
        if path in open_paths() or path.startswith(("/assets", "/docs")):
            continue
        response = server.http.request(method, path, headers=headers)
        if response.status_code != 403:
            allowed.add(f"{method} {path.removeprefix('/api/v1')}")
    run = {f"POST /runs/1/{name}" for name in
           ("started", "activity", "meeting", "exited", "reports", "logs")}  # fmt: skip
    agent = {f"{method} /agents/1/work" for method in ("GET", "POST")}
    agent |= {"POST /agents", "POST /agents/1/leave"}
    assert allowed == run | agent | {"GET /experiments/1/archive"}
    assert len(server.http.get("/api/v1/experiments/1/archive", headers=headers).content) > 0


def test_renewed_join_token_replaces_the_old_one(sqlite_server: Server) -> None:
    server = sqlite_server
    old = server.get("/agent-token")["token"]
    new = server.post("/agent-token")["token"]
    body = {"name": "a", "host": "here", "slots": [{"id": 0, "device": "cpu"}], "pool": "default"}
    codes = [
        server.http.post(
            "/api/v1/agents", json=body, headers={"Authorization": f"Bearer {token}"}
        ).status_code
        for token in (old, new)
    ]
    assert codes == [401, 200]
    assert server.post("/agents", body)["token"] == new  # for an agent with the owner's token
    server.post("/token")
    server.http.headers["Authorization"] = f"Bearer {new}"
    assert server.http.get("/api/v1/agents/1/work", params={"wait_s": 0}).status_code == 200


def test_run_token_expires_with_the_run(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    spec = server.begin()
    run = {"Authorization": f"Bearer {spec.token}"}
    agent = {"Authorization": f"Bearer {server.services.keys.agent_token}"}
    path = f"/api/v1/runs/{spec.run_id}/reports"
    body = msgspec.msgpack.encode(ReportBatch(1, [training(1, 1.0)]))
    kind = {"Content-Type": MSGPACK}

    def report(headers: dict[str, str]) -> int:
        return server.http.post(path, content=body, headers=kind | headers).status_code

    assert report(run) == report(run) == 200
    batch = msgspec.to_builtins(LogBatch(0, [LogEntry("late", time.time(), 0)]))
    server.exit(spec.run_id, 0)
    assert report(run) == 401
    for way in ("directive", "extend", "activity"):
        method = "GET" if way == "directive" else "POST"
        route = f"/api/v1/runs/{spec.run_id}/{way}"
        assert server.http.request(method, route, headers=run).status_code == 401
    # The agent still delivers the run's remaining logs and metrics.
    route = f"/api/v1/runs/{spec.run_id}/logs"
    assert server.http.post(route, json=batch, headers=agent).json() == {"stored": 1}


@pytest.mark.needs_extension("search_view")
def test_search_token_is_valid_for_its_search_routes_only(sqlite_server: Server) -> None:
    server = sqlite_server
    for _ in range(2):
        server.submit()
    headers = {"Authorization": f"Bearer {server.services.keys.search_token(1)}"}
    prefix = "/api/v1/experiments/1/searcher"
    for method, path in routes(server):
        if path in open_paths() or path.startswith(("/assets", "/docs", prefix)):
            continue
        response = server.http.request(method, path, headers=headers)
        assert response.status_code == 403, (method, path)
    assert server.http.get(prefix, headers=headers).status_code == 200
    server.http.headers["Authorization"] = f"Bearer {server.post('/token')['token']}"
    assert server.http.get(prefix, headers=headers).status_code == 200  # searchers keep theirs
    other = server.http.get(prefix.replace("1/s", "2/s"), headers=headers)
    assert other.status_code == 403


def test_route_without_guard_is_closed() -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/")
    def probe(principal: PrincipalDep) -> str:
        return str(principal)

    assert TestClient(app).get("/").status_code == 401


def test_duplicate_host_header_is_rejected(sqlite_server: Server) -> None:
    headers = [(b"host", b"127.0.0.1"), (b"host", b"evil.example")]
    response = sqlite_server.http.get("/healthz", headers=headers)
    assert response.status_code == 400
    assert "must be named once" in response.json()["error"]["message"]


def test_websocket_is_rejected(sqlite_server: Server) -> None:
    @sqlite_server.app.websocket("/api/v1/talk")
    async def talk(socket: WebSocket) -> None:
        await socket.accept()

    with (
        pytest.raises(WebSocketDisconnect),
        sqlite_server.http.websocket_connect("/api/v1/talk"),
    ):
        pass


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", ""]
)
def test_unknown_host_header_is_rejected(sqlite_server: Server, host: str) -> None:
    for path in ("/", "/api/v1/info", "/healthz"):
        response = sqlite_server.http.get(path, headers={"Host": host})
        assert response.status_code == 403
        assert "does not answer to the name" in response.json()["error"]["message"]
    assert sqlite_server.http.get("/healthz", headers={"Host": "localhost:1"}).status_code == 200


def test_responses_forbid_foreign_scripts_and_frames(sqlite_server: Server) -> None:
    for path in ("/", "/healthz", "/api/v1/info", "/api/v1/nothing", "/login?code=x"):
        headers = sqlite_server.http.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("name", CORPUS)
def test_path_traversal_is_rejected(sqlite_server: Server, name: str) -> None:
    for path in (
        f"/api/v1/checkpoints/{name}", f"/api/v1/experiments/{name}", f"/assets/{name}",
        f"/docs/{name}",
        f"/api/v1/experiments/1/{name}", f"/{name}", f"/api/v1/runs/{name}/directive",
    ):  # fmt: skip
        response = sqlite_server.http.get(path)
        assert response.status_code in {200, 404, 405, 422}, path
        assert "root:" not in response.text
        if response.status_code == 200:  # normalised by the client to a path of ours
            assert "Zerolab" in response.text or response.json()


def test_oversized_body_is_rejected(
    sqlite_server: Server,
) -> None:
    limit = sqlite_server.services.settings.limits.small_body_bytes
    path = "/api/v1/agents"
    response = sqlite_server.http.post(path, content=b" " * (limit + 1))
    assert (response.status_code, response.json()["error"]["type"]) == (413, "too_large")
    pieces = (b" " * 1_000_000 for _ in range(limit // 1_000_000 + 2))
    unsaid = sqlite_server.http.post(path, content=pieces)
    assert (unsaid.status_code, unsaid.json()["error"]["type"]) == (413, "too_large")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"name": 1}', b"[" * 200_000, b"\xff\xfe", b'{"a":' * 9999],
)
def test_malformed_body_is_rejected(sqlite_server: Server, body: bytes) -> None:
    for path in ("/agents", "/runs/1/reports", "/runs/1/logs", "/runs/1/exited"):
        for kind in ("application/json", "application/x-msgpack"):
            response = sqlite_server.http.post(
                f"/api/v1{path}", content=body, headers={"Content-Type": kind}
            )
            assert response.status_code == 422, (path, kind, response.text)


@pytest.mark.parametrize("word", ["' OR 1=1 --", '"; DROP TABLE trials; --', "%", "_", "\\", "\0"])
def test_filter_is_not_interpreted(server: Server, word: str) -> None:
    server.submit(name="plain")
    response = server.http.get("/api/v1/experiments", params={"name": word})
    assert response.status_code == (422 if word == "\0" else 200)
    if response.status_code == 200:
        assert response.json()["experiments"] == []
    assert server.http.get("/api/v1/experiments", params={"sort": word}).status_code == 422
    assert server.trial()["id"] == 1


def test_endless_request_blocks_no_other(sqlite_server: Server) -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    assert sqlite_server.http.get(f"/api/v1/checkpoints/{digest}").status_code == 404


def test_journal_detects_missed_events() -> None:
    journal = Journal(Hub(), size=3)
    assert not journal.wanted(1)
    assert journal._resume(1, None) is None
    assert journal.wanted(1)
    assert not journal.wanted(2)

    def happen(count: int) -> None:
        journal.publish([Change("", 1, "trial", number) for number in range(count)])

    happen(2)
    assert journal._resume(1, journal.cursor(1)) == 1
    assert journal._resume(1, "other-1") is None
    assert journal._resume(2, journal.cursor(1)) is None, "experiment 2 had no reader then"
    happen(3)
    assert journal._resume(1, journal.cursor(1)) is None, "event 2 is forgotten"
    assert journal._resume(1, journal.cursor(2)) == 2
    assert journal._resume(1, journal.cursor(99)) is None
    assert journal._resume(ALL, journal.cursor(5)) == 5
