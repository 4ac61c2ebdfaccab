"""A server with a certificate, or behind a proxy that has one."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.processes import LiveServer
from tests.waiting import free_port, until
from zerolab.client.http import Client
from zerolab.errors import UnreachableError
from zerolab.files import read_json

pytestmark = pytest.mark.processes


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext"]
    command += ["subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "cert.pem", tmp_path / "key.pem"


@pytest.fixture
def tls_url(tmp_path: Path, certificate: tuple[Path, Path]) -> Iterator[str]:
    cert, key = map(str, certificate)
    server = LiveServer(tmp_path / "server")
    options = ["--host-name", "localhost", "--tls-cert", cert, "--tls-key", key]
    process = server.spawn("--port", str(free_port()), *options)
    try:
        content = until("it listens", lambda: read_json(server.home / "server.json"),
                      details=server.log.read_text)  # fmt: skip
        yield str(content["url"])
    finally:
        process.kill()
        process.wait()


def test_server_speaks_tls(
    tls_url: str, tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.fullmatch(r"https://localhost:\d+", tls_url)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with Client(tls_url, "x") as client, pytest.raises(UnreachableError, match="set SSL_CERT_FILE"):
        client.info()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    token = (tmp_path / "server" / "token").read_text().strip()
    with Client(tls_url, token) as client:
        link = client.login_link()
    with httpx.Client() as browser:
        assert "Secure" in browser.get(link).headers["Set-Cookie"]
        assert browser.get(f"{tls_url}/api/v1/info").status_code == 200
        out = f"{tls_url}/api/v1/logout"
        plain = tls_url.replace("https", "http")
        assert browser.post(out, headers={"Origin": plain}).status_code == 403
        assert browser.post(out, headers={"Origin": tls_url}).status_code == 204


def test_proxy_that_adds_tls_makes_the_cookie_secure(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "server", "--host-name", "zerolab.example")
    server.start()
    try:
        proxy = {"Host": "zerolab.example", "X-Forwarded-Proto": "https"}
        link = server.client().login_link()
        with httpx.Client(headers=proxy) as browser:
            cookie = browser.get(link).headers["Set-Cookie"]
            assert "Secure" in cookie
            headers = {"Cookie": cookie.partition(";")[0], "Origin": "https://zerolab.example"}
            out = f"{server.url}/api/v1/logout"
            refused = browser.post(out, headers=headers | {"X-Forwarded-Proto": "http"})
            assert refused.status_code == 403
            assert "X-Forwarded-Proto" in refused.json()["error"]["message"]
            assert browser.post(out, headers=headers).status_code == 204
    finally:
        server.close()


def test_behind_https_needs_no_header_of_the_proxy(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "server", "--behind-https")
    server.start()
    try:
        with httpx.Client() as browser:
            cookie = browser.get(server.client().login_link()).headers["Set-Cookie"]
            assert "Secure" in cookie
            headers = {"Cookie": cookie.partition(";")[0]}
            out = f"{server.url}/api/v1/logout"
            assert browser.post(out, headers={**headers, "Origin": server.url}).status_code == 403
            headers["Origin"] = server.url.replace("http", "https")
            assert browser.post(out, headers=headers).status_code == 204
    finally:
        server.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-cert", "cert.pem"], "--tls-key: missing; give both files"),
        (["--tls-key", "key.pem"], "--tls-cert: missing; give both files"),
        (["--tls-cert", "nowhere", "--tls-key", "key.pem"], "--tls-cert: must be a file"),
        (["--tls-cert", "key.pem", "--tls-key", "cert.pem"], "must be a certificate and its key"),
        (["--trusted-proxy", "proxy.example"], "must be an IP address"),
        (["--host", "0.0.0.0"], "use --tls-cert and --tls-key"),
    ],
)
@pytest.mark.usefixtures("certificate")
def test_unusable_tls_options_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "zeroserver", "--home", str(tmp_path / "home"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
