"""Launcher of ranks on the agent's machine, forked from a process with torch if possible."""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerolab.contract.messages import SlotInfo
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import read_run_spec
from zerolab.files import append_private
from zerolab.launcher.interface import LauncherProcess
from zerolab.launcher.process import (
    MODULE,
    kill_leftovers,
    save_launcher_pid,
    start_launcher,
    stop_launcher,
)
from zerolab.paths import Home

__all__ = ["ForkServer", "LocalLauncher"]


class LocalLauncher:
    """Launcher of ranks on this machine.

    Args:
        home: Data directory of the agent.
        slots: Slots of the agent. Launchers are only forked for CPU slots because CUDA does not
            survive a fork.
    """

    def __init__(self, home: Home, slots: Sequence[SlotInfo]) -> None:
        self._slots = slots
        self._log = home.logs / "fork_server.log"
        self._forks = all(slot.device == "cpu" for slot in slots)
        self._fork_server: ForkServer | None = None

    def keep_ready(self) -> None:
        """Start a fork server if needed; the kernel kills it when the calling thread ends."""
        if self._forks and (self._fork_server is None or self._fork_server.lost):
            self._fork_server = ForkServer(self._log)

    def offers(self) -> Sequence[SlotInfo]:
        """Return the slots, which never change."""
        return self._slots

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        """Fork a launcher if possible, else start one; the launcher starts the ranks.

        The fork server has the agent's interpreter: runs with another one are not forked.
        """
        run = read_run_spec(folder.spec)
        forks = self._fork_server is not None and not run.python
        start = self._fork_server.start if forks and self._fork_server else start_launcher
        process = start(folder, environment)
        save_launcher_pid(folder, process)
        return process

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        """Stop a launcher and its ranks."""
        return stop_launcher(process, grace_s)

    def sweep(self, folder: RunFolder) -> int:
        """Kill the remaining child processes of the ranks."""
        return kill_leftovers(folder)

    def close(self) -> None:
        """End the fork server."""
        if self._fork_server is not None:
            self._fork_server.close()


logger = logging.getLogger(__name__)
_MESSAGE_BYTES = 1 << 20
_ANSWER_S = 600.0
"""Timeout of a fork request, in seconds; the server may still import modules on a busy machine."""
_SERVER_DIED = -9  # its children die with it, by SIGKILL


class _Forked:
    """A launcher process of the fork server."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None

    def poll(self) -> int | None:
        return self.exit_code


class ForkServer:
    """A process that has imported torch and forks launchers; see ``zerotrial.process.fork_server``.

    The kernel kills it when the thread that created it ends. If it does not run, launchers are
    started as new processes, which is slower.

    Args:
        log: Log file of the server.
    """

    def __init__(self, log: Path) -> None:
        client_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end, append_private(log) as output:
            command = [sys.executable, "-P", "-m", MODULE, "--serve", str(os.getpid())]
            self._process = subprocess.Popen(
                [*command, str(server_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[server_end.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._channel = client_end
        self._changed = threading.Condition()
        self._ready = False
        self._closed = False
        self._started: dict[str, _Forked] = {}
        self._running: dict[int, _Forked] = {}
        threading.Thread(target=self._listen, name="fork-server", daemon=True).start()

    def start(
        self, folder: RunFolder, environment: Mapping[str, str], timeout_s: float = 60.0
    ) -> LauncherProcess:
        """Start a launcher, as :func:`zerolab.launcher.process.start_launcher` does.

        Args:
            folder: Directory of the run, with the run specification.
            environment: Variables in addition to this process's.
            timeout_s: Maximum wait for the server to be ready, in seconds.
        """
        spec_file = str(folder.spec)
        request = {
            "spec_file": spec_file,
            "environment": dict(environment),
            "log": str(folder.launcher_log),
        }
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed, timeout_s)
            if self._ready and not self._closed:
                try:
                    self._channel.send(json.dumps(request).encode())
                except OSError:
                    self._closed = True
                # A sent request cannot be withdrawn: wait for its start or for the server's end.
                self._changed.wait_for(
                    lambda: spec_file in self._started or self._closed, _ANSWER_S
                )
                if spec_file not in self._started:
                    self._process.kill()  # it must not start the run a second time later
            forked = self._started.pop(spec_file, None)
        return forked or start_launcher(folder, environment)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def lost(self) -> bool:
        """Return whether the server died after it was ready: a new one may work."""
        return self._closed and self._ready

    def close(self) -> None:
        """End the server and every launcher that it forked."""
        self._process.kill()  # it may still be importing and not notice the closed channel
        self._process.wait()
        with contextlib.suppress(OSError):  # wakes the listening thread
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()

    def _listen(self) -> None:
        while True:
            try:
                content = self._channel.recv(_MESSAGE_BYTES)
            except OSError:
                content = b""
            with self._changed:
                if content:
                    self._handle(json.loads(content))
                else:
                    self._closed = True
                    # The kernel kills forked launchers with their server, which cannot report it.
                    for forked in self._running.values():
                        forked.exit_code = _SERVER_DIED
                self._changed.notify_all()
            if not content:
                return

    def _handle(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready = True
        elif "started" in message:
            forked = _Forked(message["started"])
            self._running[forked.pid] = forked
            self._started[message["spec_file"]] = forked
        elif "ended" in message:
            finished = self._running.pop(message["ended"], None)
            if finished is not None:
                finished.exit_code = message["exit_code"]
