"""Messages through apprise reach a real receiver at permitted addresses, without secrets."""

import json
from pathlib import Path

import pytest

from tests.server.helpers import Server, on_sqlite, serve
from tests.server.notifications.helpers import fail, messages, sent
from tests.server.notifications.receiver import Receiver

pytest.importorskip("apprise")
pytestmark = pytest.mark.processes


def add(server: Server, url: str, name: str = "chat") -> None:
    body = {"name": name, "url": url, "kind": "apprise"}
    answer = server.post("/notification-channels", body)
    assert answer["secret"] is None
    assert answer["channel"]["kind"] == "apprise"


@on_sqlite
def test_message_reaches_service(
    server: Server, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    add(server, f"json://user:sesame@localhost:{receiver.port}/path?+X-Key=sesame")
    number = fail(server, notify={"channels": ["chat"]})
    sent(server, 1)
    (message,) = receiver.messages
    assert message["title"] == "Experiment 1 (digits) failed"
    assert message["message"].startswith("ValueError: bad\n")
    assert message["message"].endswith("/#/experiments/1")
    assert message["type"] == "failure"
    receiver.statuses = [503]
    answer = server.post("/notification-channels/chat/test")
    assert answer == {"delivered": False, "error": "HTTP 503"}
    paths = ["/notification-channels", "/notifications", f"/experiments/{number}"]
    texts = [json.dumps(server.get(path)) for path in paths]
    assert "sesame" not in "".join([*texts, caplog.text])


@on_sqlite
def test_invalid_url_is_refused(server: Server) -> None:
    for url in ["nothing://sesame", "json://", "slack://sesame", "https://example.org/sesame"]:
        body = {"name": "chat", "url": url, "kind": "apprise"}
        response = server.http.post("/api/v1/notification-channels", json=body)
        assert response.status_code == 422, url
        assert "url: must be a URL of apprise" in response.text
        assert "sesame" not in response.text


def test_forbidden_addresses_and_local_services(tmp_path: Path, receiver: Receiver) -> None:
    urls = {
        "here": f"json://127.0.0.1:{receiver.port}/",
        "name": f"json://localhost:{receiver.port}/",
        "metadata": "json://169.254.169.254/",
    }
    with serve(tmp_path) as server:
        for name, url in urls.items():
            add(server, url, name)
        body = {"name": "log", "url": "syslog://", "kind": "apprise"}
        refused = server.http.post("/api/v1/notification-channels", json=body)
        assert refused.status_code == 422
        errors = {
            name: server.post(f"/notification-channels/{name}/test")["error"] for name in urls
        }
    assert "must have a public address" in errors["here"]
    assert "must have a public address" in errors["name"]
    assert "link-local or metadata" in errors["metadata"]
    assert "service of the server's machine" in refused.text
    assert receiver.bodies == []


@on_sqlite
def test_redirect_to_metadata_is_not_followed(server: Server, receiver: Receiver) -> None:
    add(server, f"json://localhost:{receiver.port}/")
    receiver.statuses = [302]
    receiver.location = "http://169.254.169.254/latest"
    error = server.post("/notification-channels/chat/test")["error"]
    assert "link-local or metadata" in error
    assert messages(server) == []
