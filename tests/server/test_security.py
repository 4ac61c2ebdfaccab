"""Who may do what: closed by default, on every route there is or will be."""

import hashlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Mount, Route

from tests.server.helpers import Server, training
from zeroserver.access.guard import COOKIE, OPEN_PATHS
from zeroserver.live import ALL, Hub, Journal
from zeroserver.store.database import Change

CORPUS = [
    "..", "../../etc/passwd", "%2e%2e%2fetc", "..%252f..%252fetc", "#", "//proc/self/root",
    "a\\..\\b", "/etc/passwd", "x" * 300, "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}", "%00",
]  # fmt: skip


def routes(server: Server) -> Iterator[tuple[str, str]]:
    """Every method and path of the application, with numbers for the parameters."""
    found = list(_flat(server.app.routes))
    assert len(found) > 30
    for route in found:
        assert isinstance(route, Route | APIRoute | Mount), route
        path = re.sub(r"\{[^}]*\}", "1", route.path)
        methods = getattr(route, "methods", None) or {"GET"}
        for method in sorted(methods - {"HEAD"}):
            yield method, path


def _flat(found: Any) -> Iterator[Any]:
    """Routes, those of included routers too."""
    for route in found:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from _flat(inner.routes)
        else:
            yield route


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic dXNlcjpwYXNz"},
        {"Authorization": "Bearer run.1.0000"},
        {"Cookie": f"{COOKIE}=1.2"},
        {"Cookie": f"{COOKIE}=99999999999.{'0' * 64}"},
        {"Authorization": "Bearer \u00ff"},
    ],
)
def test_every_route_but_those_of_the_open_list_needs_a_token(
    sqlite_server: Server, headers: dict[str, str]
) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    del sqlite_server.http.headers["Authorization"]
    closed = 0
    for method, path in routes(sqlite_server):
        if path in OPEN_PATHS or path.startswith("/assets"):
            continue
        answer = sqlite_server.http.request(method, path, headers=raw)
        assert answer.status_code == 401, (method, path, answer.status_code)
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "unauthorized"
        closed += 1
    assert closed > 25


def test_the_token_of_a_run_is_good_for_that_run_alone(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    spec = server.begin()
    headers = {"Authorization": f"Bearer {spec.token}"}
    own = f"/api/v1/runs/{spec.run_id}/"
    for method, path in routes(server):
        if path in OPEN_PATHS or path.startswith((own, "/assets")):
            continue
        answer = server.http.request(method, path, headers=headers)
        assert answer.status_code == 403, (method, path)
    other = server.http.get("/api/v1/runs/11/directive", headers=headers)
    assert other.status_code == 403
    mine = server.http.get(f"{own}directive", params={"wait_s": 0}, headers=headers)
    assert mine.json()["action"] == "train"


def test_the_token_is_private_and_in_no_answer(sqlite_server: Server) -> None:
    server = sqlite_server
    home = server.services.world.home
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


def test_a_login_link_opens_the_page_once(sqlite_server: Server) -> None:
    server = sqlite_server
    link = server.post("/login-links")["url"]
    del server.http.headers["Authorization"]
    assert server.http.get("/api/v1/info").status_code == 401
    answer = server.http.get(link, follow_redirects=False)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    for word in ("HttpOnly", "SameSite=strict", "Path=/"):
        assert word in cookie
    assert server.token not in cookie
    assert server.http.get("/api/v1/info").status_code == 200
    server.http.cookies.clear()
    again = server.http.get(link, follow_redirects=False)
    assert again.status_code == 403
    assert "Set-Cookie" not in again.headers
    assert server.http.get("/login?code=wrong").status_code == 403


def test_a_browser_may_change_things_from_our_own_page_only(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    link = server.post("/login-links")["url"]
    del server.http.headers["Authorization"]
    server.http.get(link)
    path = "/api/v1/experiments/1/pause"
    for origin in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        assert server.http.post(path, headers=origin).status_code == 403
    assert server.http.post(path, headers={"Origin": "http://127.0.0.1"}).status_code == 200


def test_a_session_ends(sqlite_server: Server) -> None:
    keys = sqlite_server.services.keys
    old = int(time.time()) - 1
    signature = keys._sign(f"session {old}")
    assert keys.caller(None, f"{old}.{signature}") is None
    later = old + 100
    assert keys.caller(None, f"{later}.{signature}") is None
    assert keys.caller(None, f"{later}.{keys._sign(f'session {later}')}") == "session"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", ""]
)
def test_a_request_under_a_foreign_name_is_refused(sqlite_server: Server, host: str) -> None:
    for path in ("/", "/api/v1/info", "/healthz"):
        answer = sqlite_server.http.get(path, headers={"Host": host})
        assert answer.status_code == 403
        assert "does not answer to the name" in answer.json()["error"]["message"]
    assert sqlite_server.http.get("/healthz", headers={"Host": "localhost:1"}).status_code == 200


def test_every_answer_forbids_foreign_scripts_and_frames(sqlite_server: Server) -> None:
    for path in ("/", "/healthz", "/api/v1/info", "/api/v1/nothing", "/login?code=x"):
        headers = sqlite_server.http.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("name", CORPUS)
def test_no_name_leads_out_of_the_data(sqlite_server: Server, name: str) -> None:
    for path in (
        f"/api/v1/checkpoints/{name}", f"/api/v1/experiments/{name}", f"/assets/{name}",
        f"/api/v1/experiments/1/{name}", f"/{name}", f"/api/v1/runs/{name}/directive",
    ):  # fmt: skip
        answer = sqlite_server.http.get(path)
        assert answer.status_code in {200, 404, 405, 422}, path
        assert "root:" not in answer.text
        if answer.status_code == 200:  # normalised by the client to a path of ours
            assert "Zerolab" in answer.text or answer.json()


def test_bodies_that_are_too_large_are_refused_whether_they_say_so_or_not(
    sqlite_server: Server,
) -> None:
    limit = sqlite_server.services.settings.limits.small_body_bytes
    path = "/api/v1/agents"
    said = sqlite_server.http.post(path, content=b" " * (limit + 1))
    assert (said.status_code, said.json()["error"]["type"]) == (413, "too_large")
    pieces = (b" " * 1_000_000 for _ in range(limit // 1_000_000 + 2))
    unsaid = sqlite_server.http.post(path, content=pieces)
    assert (unsaid.status_code, unsaid.json()["error"]["type"]) == (413, "too_large")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"name": 1}', b"[" * 200_000, b"\xff\xfe", b'{"a":' * 9999],
)
def test_bodies_that_make_no_sense_are_refused(sqlite_server: Server, body: bytes) -> None:
    for path in ("/agents", "/runs/1/reports", "/runs/1/logs", "/runs/1/exited"):
        for kind in ("application/json", "application/x-msgpack"):
            answer = sqlite_server.http.post(
                f"/api/v1{path}", content=body, headers={"Content-Type": kind}
            )
            assert answer.status_code == 422, (path, kind, answer.text)


@pytest.mark.parametrize("word", ["' OR 1=1 --", '"; DROP TABLE trials; --', "%", "_", "\\", "\0"])
def test_a_filter_is_only_ever_text(server: Server, word: str) -> None:
    server.submit(name="plain")
    answer = server.http.get("/api/v1/experiments", params={"name": word})
    assert answer.status_code == (422 if word == "\0" else 200)
    if answer.status_code == 200:
        assert answer.json()["experiments"] == []
    assert server.http.get("/api/v1/experiments", params={"sort": word}).status_code == 422
    assert server.trial()["id"] == 1


def test_a_request_without_an_end_holds_only_itself(sqlite_server: Server) -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    assert sqlite_server.http.get(f"/api/v1/checkpoints/{digest}").status_code == 404


def test_a_journal_knows_which_readers_have_missed_something() -> None:
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
