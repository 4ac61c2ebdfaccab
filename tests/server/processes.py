"""Server processes that can be killed, and servers whose agent is the test."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx

from tests.faults.fork_server import ForkServer
from tests.server.helpers import Clock, Server
from tests.waiting import DEADLINE_S, free_port, until
from zerolab.client.http import Client

UNHURRIED = ("--agent-timeout", "86400")
"""Options for a server whose agents are played by a test: no agent is ever lost."""


def serve(arguments: list[str]) -> int:
    """Run a server in a child of the fork server."""
    from zeroserver.process import main

    return main(arguments)


def serve_without_silence(arguments: list[str]) -> int:
    """Run a server whose agents are never silent or lost."""
    import zeroserver.process

    class Timings(zeroserver.process.Timings, frozen=True):
        agent_dead_s: float = 86400.0
        agent_silent_s: float = 86400.0

    zeroserver.process.Timings = Timings  # type: ignore[misc]
    return zeroserver.process.main(arguments)


@functools.cache
def _fork_server() -> ForkServer:
    """Return the process of this test run that forks servers; each would import for over 1 s."""
    log = Path(tempfile.gettempdir()) / f"zerolab-fork-server-{os.getpid()}.log"
    server = ForkServer("zeroserver.process", "tests.server.processes", log=log)
    log.unlink()
    atexit.register(server.__exit__, None, None, None)
    return server


class ForkedProcess:
    """Child of the fork server, used like a ``subprocess.Popen``."""

    def __init__(self, function: str, arguments: list[str], log: Path) -> None:
        self.pid = _fork_server().start(
            function, arguments, environment=dict(os.environ), directory=str(Path.cwd()), log=log
        )
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and _fork_server().ended(self.pid):
            self.returncode = _fork_server().wait(self.pid)
        return self.returncode

    def wait(self, timeout: float = DEADLINE_S) -> int:
        until(f"process {self.pid} has ended", lambda: self.poll() is not None, deadline_s=timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_started: "weakref.WeakSet[LiveServer]" = weakref.WeakSet()


def report_started_servers() -> str:
    """Return the exit codes and the ends of the logs of this process's servers."""
    return "\n".join(server.report() for server in _started if server.log.exists())


class LiveServer:
    """Server process on a data directory.

    Args:
        home: Data directory.
        arguments: Options of the server.
        host: Address to listen on.
        fresh: Start ``python -m zeroserver`` instead of a fork with its modules imported.
    """

    def __init__(
        self, home: Path, *arguments: str, host: str = "127.0.0.1", fresh: bool = False
    ) -> None:
        _started.add(self)
        self.home = home
        self.host = host
        self.port = 0
        self._arguments = (*UNHURRIED, *arguments)
        self._program = ["-m", "zeroserver"] if fresh else []
        self._function = "tests.server.processes:serve"
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
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

    def spawn(self, *arguments: str) -> "subprocess.Popen[bytes] | ForkedProcess":
        if not self._program:
            options = ["--home", str(self.home), *arguments]
            return ForkedProcess(self._function, options, self.log)
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
    server._function = "tests.server.processes:serve_without_silence"
    server.start()
    try:
        headers = {"Authorization": f"Bearer {server.token}"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=DEADLINE_S) as http:
            owner = Server(cast("Any", None), cast("Any", http), server.token, folder, Clock())
            yield server, owner
    finally:
        server.close()
