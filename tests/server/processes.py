"""Server processes that can be killed, and servers whose agent is the test."""

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx

from tests.server.helpers import Clock, Server
from tests.waiting import DEADLINE_S, free_port, until
from zerolab.client.http import Client

UNHURRIED = ("--agent-timeout", "86400")
"""Options for a server whose agents are played by a test: no agent is ever lost."""

NEVER_SILENT = """
import sys
import zeroserver.process

class Timings(zeroserver.process.Timings, frozen=True):
    agent_dead_s: float = 86400.0
    agent_silent_s: float = 86400.0

zeroserver.process.Timings = Timings
sys.exit(zeroserver.process.main())
"""


_started: "weakref.WeakSet[LiveServer]" = weakref.WeakSet()


def report_started_servers() -> str:
    """Return the exit codes and the ends of the logs of this process's servers."""
    return "\n".join(server.report() for server in _started if server.log.exists())


class LiveServer:
    """``python -m zeroserver`` on a data directory."""

    def __init__(self, home: Path, *arguments: str, host: str = "127.0.0.1") -> None:
        _started.add(self)
        self.home = home
        self.host = host
        self.port = 0
        self._arguments = (*UNHURRIED, *arguments)
        self._program = ["-m", "zeroserver"]
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[Client] = []
        self.log = home.parent / f"{home.name}.log"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def agent_token(self) -> str:
        return (self.home / "agent.token").read_text().strip()

    def start(self) -> None:
        """Start the server on its previous port and wait until it listens."""
        (self.home / "server.json").unlink(missing_ok=True)
        self.port = self.port or free_port()
        self._process = self.spawn("--host", self.host, "--port", str(self.port), *self._arguments)
        until(
            "the server listens, or has ended", self._listens_or_ended, details=self.log.read_text
        )
        assert self._process.poll() is None, self.log.read_text()
        content = json.loads((self.home / "server.json").read_text())
        assert content == {"url": self.url, "pid": self._process.pid}

    def _listens_or_ended(self) -> bool:
        assert self._process is not None
        return (self.home / "server.json").exists() or self._process.poll() is not None

    def spawn(self, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, *self._program, "--home", str(self.home), *arguments]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))

    def client(self) -> Client:
        """Return a client with separate connections; it is closed with the server."""
        client = Client(self.url, self.token, timeout_s=DEADLINE_S)
        self._clients.append(client)
        return client

    def report(self) -> str:
        """Return the exit code and the end of the log."""
        code = self._process.poll() if self._process is not None else None
        state = "runs" if code is None else f"ended with code {code}"
        return f"{self.home} {state}; its log ends with\n{self.log.read_text()[-4000:]}"

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(DEADLINE_S)

    def stop(self) -> int:
        """Stop the server; return its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(DEADLINE_S)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self._process is not None and self._process.poll() is None:
            self.kill()


@contextmanager
def played(folder: Path) -> Iterator[tuple[LiveServer, Server]]:
    """Start a server whose agents a test plays, and return it with its owner.

    However slow the test is, its agents are never silent or lost.
    """
    server = LiveServer(folder / "home")
    server._program = ["-c", NEVER_SILENT]
    server.start()
    try:
        headers = {"Authorization": f"Bearer {server.token}"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=DEADLINE_S) as http:
            owner = Server(cast("Any", None), cast("Any", http), server.token, folder, Clock())
            yield server, owner
    finally:
        server.close()
