"""A receiver of webhooks on this machine that verifies the signatures of messages."""

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """Messages that were received, and the responses to the next ones."""

    port: int = 0
    secret: str = ""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next responses; 204 after them."""
    held: threading.Event = field(default_factory=threading.Event)
    """Responses wait for it while ``hold`` is set."""
    hold: bool = False
    location: str = ""
    """Target of redirects; a path of the receiver by default."""
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}/hook/of-the-team?key=sesame"

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.bodies]

    @property
    def events(self) -> list[str]:
        return [message["event"] for message in self.messages]

    def verify(self, index: int) -> None:
        """Check the signature of a message, as the specification of Standard Webhooks says."""
        headers, body = self.headers[index], self.bodies[index]
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(self.secret.removeprefix("whsec_"))
        expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"


@contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    """Run a receiver until the block ends."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.headers.append({name.lower(): text for name, text in self.headers.items()})
            receiver.bodies.append(body)
            if receiver.hold:
                receiver.held.wait()
            status = receiver.statuses.pop(0) if receiver.statuses else 204
            self.send_response(status)
            if status == 302:
                elsewhere = f"http://localhost:{receiver.port}/elsewhere"
                self.send_header("Location", receiver.location or elsewhere)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        receiver.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield receiver
        finally:
            receiver.held.set()
            server.shutdown()
            thread.join()
