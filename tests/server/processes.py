"""A server as a process of its own, that can be killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from zerolab.client.http import Client

DEADLINE_S = 120.0
"""For anything that must happen; far more than it takes."""


class LiveServer:
    """``python -m zeroserver`` on a data directory."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.port = 0
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.log = home.parent / f"{home.name}.log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()

    def start(self) -> None:
        """Start it, on the port it had before, and wait until it listens."""
        (self.home / "server.json").unlink(missing_ok=True)
        deadline = time.monotonic() + DEADLINE_S
        restarted = self.port != 0
        while True:
            # Not a port that the system gives away: someone might have it when we come back, even
            # one of our own clients that tries to connect to it.
            self.port = self.port if restarted else random.randint(20_000, 30_000)
            self._process = self.spawn("--port", str(self.port), *self._arguments)
            while not (self.home / "server.json").exists() and self._process.poll() is None:
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.01)
            if self._process.poll() is None:
                break
            assert "cannot listen" in self.log.read_text(), self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
        said = json.loads((self.home / "server.json").read_text())
        assert said == {"url": self.url, "pid": self._process.pid}

    def spawn(self, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "zeroserver", "--home", str(self.home), *arguments]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))

    def client(self) -> Client:
        return Client(self.url, self.token)

    def kill(self) -> None:
        """End it as a power cut would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(DEADLINE_S)

    def stop(self) -> int:
        """Ask it to end; return its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(DEADLINE_S)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
