"""Messages about events of experiments: stored once, signed, retried and listed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.access.test_users import add_user, ask
from tests.server.helpers import Server, on_sqlite, serve
from tests.server.notifications.helpers import add, fail, messages, sent
from tests.server.notifications.receiver import Receiver, receiving
from tests.server.processes import LiveServer
from tests.waiting import free_port, until
from zerolab.client.archive import pack
from zeroserver.extensions.notifications.addresses import (
    AddressError,
    address_problem,
    url_problem,
)

DAY_S = 86400.0


def tried(server: Server, attempts: int) -> list[dict[str, Any]]:
    """Wait until the oldest message was tried so many times; return all messages."""
    return until(
        f"{attempts} attempts", lambda: messages(server), lambda r: r[0]["attempts"] == attempts
    )


def test_channels_of_a_user_and_a_project(server: Server, receiver: Receiver) -> None:
    server.post("/users", {"name": "ann", "role": "member"})
    server.post("/projects", {"name": "vision"})
    wanted = {"of user": {"user": "ann"}, "of project": {"project": "vision"}}
    wanted["of both"] = {"user": "ann", "project": "vision"}
    for name, scope in wanted.items():
        channel = add(server, receiver, name.replace(" ", "-"), events=["canceled"], **scope)[
            "channel"
        ]
        assert (channel["user"], channel["project"]) == (scope.get("user"), scope.get("project"))
    token = server.post("/users/ann/tokens", {})["secret"]
    admin = server.http.headers["Authorization"]
    for owner in (admin, f"Bearer {token}"):
        server.http.headers["Authorization"] = owner
        server.submit()
        server.submit(project="vision")
    server.http.headers["Authorization"] = admin
    for experiment_id in (1, 2, 3, 4):
        server.act("cancel", experiment_id)
    rows = sent(server, 5)
    assert {(row["channel"], row["experiment_id"]) for row in rows} == {
        ("of-project", 2), ("of-user", 3), ("of-user", 4), ("of-project", 4), ("of-both", 4),
    }  # fmt: skip
    for body, status in (
        ({"user": "vic"}, 404),
        ({"project": "text"}, 404),
        ({"user": "ann", "all_experiments": True}, 422),
        ({"user": ""}, 422),
        ({"project": ""}, 422),
    ):
        new = {"name": "x", "url": receiver.url, **body}
        assert server.http.post("/api/v1/notification-channels", json=new).status_code == status


def test_channels_of_restricted_projects_are_hidden(server: Server, receiver: Receiver) -> None:
    """A user who is no member can neither find nor name the channel."""
    token = add_user(server, "bob", "member")
    server.post("/projects", {"name": "secret"})
    add(server, receiver, "hush", project="secret")
    server.submit(notify={"channels": ["hush"], "events": ["canceled"]})  # in project default
    server.act("cancel")
    assert [row["channel"] for row in sent(server, 1)] == ["hush"]
    assert "hush" in ask(server, token, "GET", "/notifications").text
    server.request("PATCH", "/projects/secret", json={"restricted": True})
    for channel in ("hush", "missing"):
        response = ask(server, token, "GET", "/notifications", params={"channel": channel})
        assert response.status_code == 404
        assert f"there is no channel {channel};" in response.text
    for path in ("/notifications", "/notification-channels"):
        assert "hush" not in ask(server, token, "GET", path).text
    assert [row["channel"] for row in messages(server)] == ["hush"]
    server.http.headers["Authorization"] = f"Bearer {token}"
    response = server.try_submit(notify={"channels": ["hush"]})
    assert "notify.channels[0]: must be a channel of the server" in response.text


def test_failure_sends_signed_message(server: Server, receiver: Receiver) -> None:
    channel = add(server, receiver)["channel"]
    assert channel["events"] == ["finished", "failed", "alert"]
    events = ["failed", "trial_failed", "finished"]
    fail(server, labels=["a"], notify={"channels": ["team"], "events": events})
    assert [row["event"] for row in sent(server, 2)] == ["trial_failed", "failed"]
    receiver.verify(0)
    receiver.verify(1)
    assert receiver.headers[1]["host"] == f"localhost:{receiver.port}"
    message = receiver.messages[1]
    assert message["title"] == "Experiment 1 (digits) failed"
    assert "ValueError: bad" in message["text"]
    assert message["url"].endswith("/#/experiments/1")
    assert message["experiment"]["state"] == "ERROR"
    assert message["experiment"]["labels"] == ["a"]
    assert receiver.messages[0]["trial"]["id"] == 1
    (listed,) = server.get("/notification-channels")["channels"]
    assert (listed["pending"], listed["failed"], listed["error"]) == (0, 0, None)
    assert listed["last_sent_at"] is not None


def test_channels_get_their_events(server: Server, receiver: Receiver) -> None:
    add(server, receiver, "all", all_experiments=True, events=["canceled"])
    add(server, receiver, "named", events=["canceled", "finished"])
    add(server, receiver, "other", events=["canceled"])
    server.submit()
    server.act("cancel", 1)
    server.submit(notify={"channels": ["named"]})
    server.act("kill", 2)
    server.submit(notify={"channels": ["named", "all"], "events": ["finished"]})
    server.act("kill", 3)
    rows = sent(server, 3)
    assert {(row["channel"], row["experiment_id"]) for row in rows} == {
        ("all", 1), ("all", 2), ("named", 2),
    }  # fmt: skip
    assert len(messages(server)) == 3
    assert server.get("/notifications", channel="named")["notifications"][0]["experiment_id"] == 2
    assert len(server.get("/notifications", experiment=2)["notifications"]) == 2


def test_failed_delivery_is_retried_with_same_id(server: Server, receiver: Receiver) -> None:
    add(server, receiver)
    receiver.statuses = [500, 302, 429]
    fail(server, notify={"channels": ["team"]})
    for attempts, problem in enumerate(["HTTP 500", "HTTP 302: redirects", "HTTP 429"], 1):
        (row,) = tried(server, attempts)
        assert row["state"] == "PENDING"
        assert row["error"].startswith(problem)
        (channel,) = server.get("/notification-channels")["channels"]
        assert channel["pending"] == 1
        assert channel["error"] == row["error"]
        server.clock.now += 3600
    sent(server, 1)
    assert len({headers["webhook-id"] for headers in receiver.headers}) == 1
    assert len({headers["webhook-timestamp"] for headers in receiver.headers}) == 4
    receiver.verify(3)


@on_sqlite
def test_undeliverable_message_is_given_up(server: Server, receiver: Receiver) -> None:
    add(server, receiver)
    receiver.statuses = [500] * 100
    fail(server, notify={"channels": ["team"]})
    tried(server, 1)
    server.clock.now += DAY_S
    row = until("it is given up", lambda: messages(server)[0], lambda r: r["state"] == "FAILED")
    assert row["attempts"] == 2
    (channel,) = server.get("/notification-channels")["channels"]
    assert (channel["pending"], channel["failed"]) == (0, 1)
    server.clock.now += 31 * DAY_S
    until("it is removed", lambda: messages(server) == [])


@on_sqlite
def test_slow_receiver_delays_no_other(server: Server, receiver: Receiver) -> None:
    add(server, receiver, "slow")
    receiver.hold = True
    with receiving() as quick:
        add(server, quick, "quick")
        fail(server, notify={"channels": ["slow", "quick"]})
        fail(server, notify={"channels": ["slow", "quick"]})
        until("the quick one has both", lambda: len(quick.bodies) == 2)
    assert [row["channel"] for row in sent(server, 2)] == ["quick", "quick"]
    receiver.held.set()
    sent(server, 4)
    assert len(receiver.bodies) == 2


@on_sqlite
def test_test_message_reports_result(server: Server, receiver: Receiver) -> None:
    add(server, receiver)
    assert server.post("/notification-channels/team/test") == {"delivered": True, "error": None}
    receiver.verify(0)
    receiver.statuses = [404]
    answer = server.post("/notification-channels/team/test")
    assert answer == {"delivered": False, "error": "HTTP 404"}
    with receiving() as gone:
        add(server, gone, "gone")
    answer = server.post("/notification-channels/gone/test")
    assert answer == {"delivered": False, "error": "connection refused"}


@on_sqlite
def test_secrets_are_not_shown(
    server: Server, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    secret = add(server, receiver)["secret"]
    receiver.statuses = [500]
    number = fail(server, "bad", notify={"channels": ["team"]})
    tried(server, 1)
    paths = ["/notification-channels", "/notifications", f"/experiments/{number}"]
    texts = [json.dumps(server.get(path)) for path in paths]
    refused = server.http.post(
        "/api/v1/notification-channels", json={"name": "x", "url": receiver.url, "events": []}
    )
    assert refused.status_code == 422
    texts += [refused.text, caplog.text]
    assert not [text for text in texts if "sesame" in text or secret in text]


@on_sqlite
def test_unknown_channel_is_refused(server: Server, receiver: Receiver) -> None:
    response = server.try_submit(notify={"channels": ["team", "nobody"]})
    assert response.status_code == 422
    problems = response.json()["error"]["problems"]
    assert [problem.partition(":")[0] for problem in problems] == [
        "notify.channels[0]", "notify.channels[1]",
    ]  # fmt: skip
    add(server, receiver)
    repeated = server.http.post(
        "/api/v1/notification-channels", json={"name": "team", "url": receiver.url}
    )
    assert repeated.status_code == 409
    server.submit(notify={"channels": ["team"]})
    server.request("DELETE", "/notification-channels/team")
    server.act("kill", 1)
    assert messages(server) == []
    assert server.get("/notification-channels")["channels"] == []


@pytest.mark.processes
def test_message_survives_server_kill(tmp_path: Path) -> None:
    port = free_port()
    server = LiveServer(tmp_path / "home", "--allow-private-webhooks")
    server.start()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "train.py").touch()
    try:
        client = server.client()
        url = f"http://127.0.0.1:{port}/"
        secret = client.add_notification_channel("team", url, ["canceled"])["secret"]
        config = {
            "entrypoint": "python train.py",
            "searcher": {"name": "single"},
            "notify": {"channels": ["team"]},
        }
        number = client.create_experiment(config, pack(tmp_path / "model"))["id"]
        client.experiment_action(number, "kill")
        server.kill()
        with receiving(port) as receiver:
            receiver.secret = secret
            server.start()
            until("the message is sent", lambda: client.notifications()[0]["state"] == "SENT")
            assert receiver.events == ["canceled"]
            receiver.verify(0)
    finally:
        server.close()


PUBLIC = ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"]
PRIVATE = ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "::1", "fd12::1", "100.64.0.1"]
PRIVATE += ["::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "192.0.0.1"]
NEVER = ["169.254.169.254", "169.254.1.1", "fe80::1", "fe80::1%eth0", "fd00:ec2::254"]
NEVER += ["::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "100.100.100.200"]
NEVER += ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1"]


def test_addresses_that_receive_messages() -> None:
    for address in [*PUBLIC, *PRIVATE, *NEVER]:
        problem = address_problem(address, allow_private=False)
        assert (problem is None) == (address in PUBLIC), address
        problem = address_problem(address, allow_private=True)
        assert (problem is None) == (address not in NEVER), address


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org", "https://", "example.org/hook", "http://user:word@example.org",
        "http://example.org:99999", "http://example.org:0", "http://exa mple.org",
        "http://example.org/\x00", "file:///etc/passwd", "http://[::1", "http://example.org/\u00e9",
    ],
)  # fmt: skip
def test_invalid_webhook_url_is_refused(url: str) -> None:
    assert url_problem(url)


def test_private_address_is_refused_without_option(tmp_path: Path, receiver: Receiver) -> None:
    """A host that gets a private address later, such as by DNS rebinding, is refused, too."""
    with serve(tmp_path) as server:
        body = {"name": "team", "url": receiver.url}
        response = server.http.post("/api/v1/notification-channels", json=body)
        assert response.status_code == 422
        (problem,) = response.json()["error"]["problems"]
        assert "must have a public address" in problem
        assert "--allow-private-webhooks" in problem
        assert "sesame" not in response.text
        server.execute(
            "INSERT INTO notification_channels (name, kind, url, secret, events, all_experiments, "
            "created_at) VALUES ('old', 'webhook', :url, 'whsec_', '[]', 0, 0)",
            url=receiver.url,
        )
        answer = server.post("/notification-channels/old/test")
        assert not answer["delivered"]
        assert "must have a public address" in answer["error"]
    assert receiver.bodies == []


def test_all_addresses_of_a_host_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from zeroserver.extensions.notifications.addresses import resolve

    async def check() -> None:
        loop = asyncio.get_running_loop()
        found = [(2, 1, 6, "", (address, 443)) for address in (PUBLIC[0], "10.0.0.1")]

        async def two_addresses(*_: object, **_options: object) -> list[Any]:
            return found

        monkeypatch.setattr(loop, "getaddrinfo", two_addresses, raising=False)
        with pytest.raises(AddressError, match=r"10\.0\.0\.1"):
            await resolve("https://example.org/", allow_private=False)
        del found[1]
        assert await resolve("https://example.org/", allow_private=False) == PUBLIC[0]

    asyncio.run(check())
