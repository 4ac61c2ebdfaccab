"""Program of a task under test: returns requests, streams, and sets cookies."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

released = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/release":
            released.set()
        if self.path == "/stream":  # the second part only after the first was received
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\r\nfirst\r\n")
            released.wait()
            self.wfile.write(b"6\r\nsecond\r\n0\r\n\r\n")
            return
        self.report(0)

    def do_POST(self) -> None:
        size = 0
        while length := int(self.rfile.readline(), 16):
            size += len(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        self.report(size)

    def report(self, size: int) -> None:
        content = {"path": self.path, "headers": dict(self.headers.items()), "size": size}
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Set-Cookie", "app=1; Path=/")
        self.send_header("Set-Cookie", "wide=1; Domain=localhost")
        if name := self.headers.get("X-Set"):
            self.send_header("Set-Cookie", f"{name}=stolen")
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
