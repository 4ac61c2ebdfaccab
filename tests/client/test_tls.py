"""A server with TLS on a loopback address; its certificate is checked on any port."""

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerolab.cli.local import background
from zerolab.client.http import Client
from zerolab.errors import CertificateError, ConfigError
from zerolab.files import write_json
from zerolab.paths import Home


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext"]
    command += ["subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_certificate_of_environment_is_trusted(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # a proxy is not used for loopback
    untrusted = pytest.raises(CertificateError, match=r"not trusted here .* set SSL_CERT_FILE")
    with Client(f"https://localhost:{port}") as client, untrusted:
        client.get("/info")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with Client(f"https://localhost:{port}") as client:
        assert client.get("/info") == {}
    another = pytest.raises(
        CertificateError, match=r"another name .* use a name of the certificate"
    )
    with Client(f"https://127.0.0.1:{port}") as client, another:
        client.get("/info")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_unreadable_certificates_of_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "cert.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(ConfigError, match="SSL_CERT_FILE: must be a file with certificates, got"):
        Client("https://localhost:1")
    Client("http://localhost:1").close()


def test_start_with_untrusted_certificate_fails_at_once(port: int, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    write_json(home.server_file, {"url": f"https://localhost:{port}"})
    with pytest.raises(CertificateError, match="set SSL_CERT_FILE"):
        background._wait_for_server(home, lambda: True)
