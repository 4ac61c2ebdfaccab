"""The server behind nginx and Caddy, with the configurations of docs/how_to/security.md."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, free_port, until
from zerolab.client import archive
from zerolab.client.http import Client
from zerolab.contract.spec import ENV_HOME

pytestmark = pytest.mark.processes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how_to" / "security.md"
NGINX = """
{user}
daemon off;
pid nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi; scgi_temp_path scgi;
{server}
}}
"""
CADDY = """
{{
    admin off
    auto_https off
}}
{site}
"""
CONFIG = {"entrypoint": "python x.py", "searcher": {"name": "single"}, "max_restarts": 0}
LARGE = 12 * 2**20


def config_of(title: str) -> str:
    """Return the code block after the line that starts with a title."""
    match = re.search(rf"^{title}.*?```\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[1]


def command_of(proxy: str, folder: Path, port: int, target: int) -> list[str]:
    """Write the configuration of a proxy; return the command that starts it."""
    if proxy == "nginx":
        text = config_of("nginx:").replace("listen 443", f"listen 127.0.0.1:{port}")
        text = text.replace("/etc/ssl/zerolab/fullchain.pem", str(folder / "cert.pem"))
        text = text.replace("/etc/ssl/zerolab/privkey.pem", str(folder / "key.pem"))
        text = NGINX.format(server=text, user="user root;" if os.geteuid() == 0 else "")
        command = ["nginx", "-p", str(folder), "-c", str(folder / proxy), "-e", "stderr"]
    else:
        tls = f"{{\n    tls {folder / 'cert.pem'} {folder / 'key.pem'}"
        text = config_of("Caddy").replace("example.org {", f"example.org:{port} {tls}", 1)
        text = CADDY.format(site=text)
        command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / proxy)]
    assert "127.0.0.1:8080" in text
    text = text.replace("127.0.0.1:8080", f"127.0.0.1:{target}")
    (folder / proxy).write_text(text.replace("zerolab.example.org", "localhost"))
    return command


@pytest.fixture(params=["nginx", "caddy"])
def proxied(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LiveServer, str]]:
    """Start a server and a proxy; yield the server and the proxy's address."""
    proxy = request.param
    if shutil.which(proxy) is None or shutil.which("openssl") is None:
        pytest.skip(f"{proxy} or openssl is not installed")
    openssl = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    openssl += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext"]
    openssl += ["subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(openssl, cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    server = LiveServer(tmp_path / "server", "--host-name", "localhost")
    server.start()
    port = free_port()
    log = tmp_path / "proxy.log"
    home = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    command = command_of(proxy, tmp_path, port, server.port)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **home}
        )
    url = f"https://localhost:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"{url}/healthz").is_success
        except httpx.TransportError:
            return False

    try:
        until("the proxy answers", answers, details=log.read_text)
        yield server, url
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        server.close()


def test_page_behind_proxy(proxied: tuple[LiveServer, str]) -> None:
    """Secure cookie, changes from the page's own origin only, and events as they happen."""
    server, url = proxied
    with Client(url, server.token) as client:
        link = client.login_link()
    assert link.startswith(f"{url}/")
    with httpx.Client(timeout=DEADLINE_S) as browser:
        assert "Secure" in browser.get(link).headers["Set-Cookie"]
        create = f"{url}/api/v1/models"
        for origin in (url.replace("https", "http"), "https://evil.example", server.url):
            refused = browser.post(create, json={"name": "m"}, headers={"Origin": origin})
            assert refused.status_code == 403, origin
        with browser.stream("GET", f"{url}/api/v1/events") as events:
            assert events.headers["Content-Type"].startswith("text/event-stream")
            lines = events.iter_lines()
            assert next(lines) == "retry: 1000"
            server.client().create_experiment(
                CONFIG | {"name": "seen"}, archive.pack(_script(server, "1"))
            )
            assert any('"seen"' in line for line in lines)
        response = browser.post(create, json={"name": "m"}, headers={"Origin": url})
        assert response.is_success, response.text


def _script(server: LiveServer, source: str) -> Path:
    folder = server.home.parent / "model"
    folder.mkdir(exist_ok=True)
    (folder / "x.py").write_text(source)
    return folder


def test_agent_and_large_files_behind_proxy(
    proxied: tuple[LiveServer, str], tmp_path: Path
) -> None:
    """Transfer an incompressible model directory through the proxy in both directions."""
    server, url = proxied
    folder = _script(
        server, f"import os; assert os.path.getsize('data.bin') == {LARGE}; print('ok')"
    )
    content = random.Random(0).randbytes(LARGE)
    (folder / "data.bin").write_bytes(content)
    command = [sys.executable, "-m", "zerolab", "agent", "start", "--server", url, "--cpu"]
    environment = {**os.environ, ENV_HOME: str(tmp_path / "agent"), "CUDA_VISIBLE_DEVICES": ""}
    log = tmp_path / "agent.log"
    with log.open("wb") as output, Client(url, server.token, timeout_s=DEADLINE_S) as client:
        token = [*command, "--slots", "1", "--token-file", str(server.home / "agent.token")]
        agent = subprocess.Popen(token, env=environment, stdout=output, stderr=output)
        try:
            number = client.create_experiment(CONFIG, archive.pack(folder))["id"]
            ended = until(
                "the experiment has ended",
                lambda: client.experiment(number),
                lambda row: row["state"] in {"COMPLETED", "ERROR"},
                details=log.read_text,
            )
            logs = client.get(f"/experiments/{number}/logs", limit=100)["logs"]
            assert ended["state"] == "COMPLETED", json.dumps(logs)
            assert "ok" in [line["text"] for line in logs]
        finally:
            agent.terminate()
            agent.wait(DEADLINE_S)
    address = f"{url}/api/v1/experiments/{number}/file"
    headers = {"Authorization": f"Bearer {server.token}"}
    query = {"name": "data.bin"}
    down = httpx.get(address, params=query, headers=headers, timeout=DEADLINE_S)
    assert down.content == content
