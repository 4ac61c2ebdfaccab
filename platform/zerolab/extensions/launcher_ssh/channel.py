"""Connection of the coordinator to a node: a local process, or ssh to another machine."""

import contextlib
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from zerolab.extensions.launcher_ssh.messages import (
    Ended,
    FromCoordinator,
    FromWorker,
    RankOutput,
    decode_from_worker,
    encode,
)
from zerolab.extensions.launcher_ssh.tunnel import Tunnel

__all__ = [
    "Channel",
    "ChannelClosed",
    "NodeMessage",
    "TunnelOpened",
    "local_command",
    "ssh_command",
]

WORKER_MODULE = "zerolab.extensions.launcher_ssh.worker"
_ALLOCATED = re.compile(r"Allocated port (\d+) for remote forward")
"""Message of ssh when the other end of its tunnel is open."""
_KEPT_LINES = 5
"""Lines of ssh's standard error that are kept for the error message."""
_READ_ATTEMPTS = 10
"""Attempts to read these lines, within 1 s: another ssh that shares the connection may keep the
pipe open."""


class ChannelClosed(NamedTuple):
    """End of the channel; the coordinator knows whether the node reported its outcome before."""

    exit_code: int
    stderr: str
    """The last lines on standard error."""


class TunnelOpened(NamedTuple):
    """Opened tunnel: a port of the node leads through ssh to the server."""

    port: int


class NodeMessage(NamedTuple):
    """Message of a node, with the node's name."""

    host: str
    message: FromWorker | ChannelClosed | TunnelOpened


def local_command() -> list[str]:
    """Return the command that starts a node's process on this machine."""
    return [sys.executable, "-P", "-m", WORKER_MODULE]


def ssh_command(
    host: str,
    *,
    python: str = "",
    config: Path | None = None,
    port: int | None = None,
    tunnel: Tunnel | None = None,
) -> list[str]:
    """Return the command that starts a node's process on another machine.

    Ssh never prompts at the terminal, and rejects hosts with unknown keys.

    Args:
        host: Name for ssh, perhaps with ``user@``.
        python: Interpreter of the machine; this one's path if empty.
        config: Value of ``ssh -F``.
        port: Value of ``ssh -p``.
        tunnel: Tunnel that lasts as long as the connection.
    """
    command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    command += ["-o", "ConnectTimeout=20"]
    if config is not None:
        command += ["-F", str(config)]
    if port is not None:
        command += ["-p", str(port)]
    if tunnel is not None:
        command += [
            "-o",
            "ExitOnForwardFailure=yes",
            "-o",
            "LogLevel=INFO",
            "-o",
            "ControlPath=none",
        ]
        command += ["-R", tunnel.forward]
    remote = shlex.join([python or sys.executable, "-P", "-m", WORKER_MODULE])
    return [*command, "--", host, f"exec {remote}"]


class Channel:
    """Starts a node's process, exchanges messages with it, and ends with it.

    Args:
        host: Name of the node.
        command: The command that starts the process.
        messages: Queue for the node's messages.
    """

    def __init__(
        self, host: str, command: Sequence[str], messages: "queue.Queue[NodeMessage]"
    ) -> None:
        self.host = host
        self.heard = time.monotonic()
        """Time of the last heartbeat, on the monotonic clock."""
        self._news = messages
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # only the coordinator handles Ctrl-C of the terminal
        )
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._write, daemon=True).start()
        self._last_words: list[str] = []
        self._complains = threading.Thread(target=self._keep_stderr, daemon=True)
        self._complains.start()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the node's process, or of its ssh."""
        return self._process.pid

    def send(self, message: FromCoordinator) -> None:
        """Queue a message to the node; a lost node is detected elsewhere."""
        self._outbox.put(encode(message))

    def close(self) -> None:
        """Close the channel after all messages; the node then ends everything that it started."""
        self._outbox.put(None)

    def kill(self) -> None:
        """End this side of the channel immediately; the node ends because it has no coordinator."""
        self.close()
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, up to a timeout; return whether the channel has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.poll() is not None

    def _write(self) -> None:
        """Send queued messages, in a thread because a node may be slow."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):
            while (content := self._outbox.get()) is not None:
                pipe.write(content)
                pipe.flush()
        with contextlib.suppress(OSError):
            pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.heard = time.monotonic()
                try:
                    message = decode_from_worker(line)
                except msgspec.DecodeError:  # a login shell's greeting
                    message = RankOutput(line.rstrip() + b"\n")
                self._news.put(NodeMessage(self.host, message))
                if isinstance(message, Ended):
                    self.close()
        code = self._process.wait()
        for _ in range(_READ_ATTEMPTS):  # a pause of the machine affects one attempt, not all
            self._complains.join(1.0 / _READ_ATTEMPTS)
        self._news.put(NodeMessage(self.host, ChannelClosed(code, "; ".join(self._last_words))))

    def _keep_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").strip()
                opened = _ALLOCATED.match(text)
                if opened is not None:
                    self._news.put(NodeMessage(self.host, TunnelOpened(int(opened[1]))))
                elif text:
                    self._last_words = [*self._last_words, text][-_KEPT_LINES:]
