"""One node, as the head sees it: a process here, or ssh to another machine."""

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

from zerolab.launcher.nodes.messages import (
    Ended,
    FromHead,
    FromNode,
    Said,
    decode_from_node,
    encode,
)
from zerolab.launcher.nodes.tunnel import Tunnel

__all__ = ["Channel", "Gone", "News", "Opened", "local_words", "ssh_words"]

NODE = "zerolab.launcher.nodes.worker"
_ALLOCATED = re.compile(r"Allocated port (\d+) for remote forward")
"""What ssh says when the other end of its tunnel is open."""
_LAST_WORDS = 5
"""Lines of ssh's own that are kept for the message when it fails."""
_LOOKS = 10
"""For these lines, within a second: another ssh that shares its connection may keep them open."""


class Gone(NamedTuple):
    """The channel has ended; whether the node's end was heard before is for the head to know."""

    exit_code: int
    said: str
    """Its last lines on standard error."""


class Opened(NamedTuple):
    """A port of the node leads through ssh to where the head said."""

    port: int


class News(NamedTuple):
    """Something that a node has said."""

    host: str
    message: FromNode | Gone | Opened


def local_words() -> list[str]:
    """The command that starts a node's process on this machine."""
    return [sys.executable, "-P", "-m", NODE]


def ssh_words(
    host: str,
    *,
    python: str = "",
    config: Path | None = None,
    port: int | None = None,
    tunnel: Tunnel | None = None,
) -> list[str]:
    """The command that starts a node's process on another machine.

    Nothing is asked at the terminal, and a host whose key is not known is refused.

    Args:
        host: As ssh knows it, ``user@`` included.
        python: Its interpreter; ours, at the same place, when empty.
        config: For ``ssh -F``.
        port: For ``ssh -p``.
        tunnel: Lasts as long as the connection.
    """
    words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    words += ["-o", "ConnectTimeout=20"]
    if config is not None:
        words += ["-F", str(config)]
    if port is not None:
        words += ["-p", str(port)]
    if tunnel is not None:
        words += ["-o", "ExitOnForwardFailure=yes", "-o", "LogLevel=INFO", "-o", "ControlPath=none"]
        words += ["-R", tunnel.forward]
    remote = shlex.join([python or sys.executable, "-P", "-m", NODE])
    return [*words, "--", host, f"exec {remote}"]


class Channel:
    """Starts a node's process, hears what it says, and ends with it.

    Args:
        host: Name of the node.
        words: The command that starts it.
        news: Where its messages go.
    """

    def __init__(self, host: str, words: Sequence[str], news: "queue.Queue[News]") -> None:
        self.host = host
        self.heard = time.monotonic()
        """When the node gave a sign of life, on the monotonic clock."""
        self._news = news
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal is for the head alone
        )
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._write, daemon=True).start()
        self._last_words: list[str] = []
        self._complains = threading.Thread(target=self._keep_complaints, daemon=True)
        self._complains.start()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the node's process, or of its ssh."""
        return self._process.pid

    def send(self, message: FromHead) -> None:
        """Tell the node something; one that is gone, or hears nothing, is found out elsewhere."""
        self._outbox.put(encode(message))

    def close(self) -> None:
        """End the channel when all is said, and with it all that the node has started."""
        self._outbox.put(None)

    def kill(self) -> None:
        """End this side of the channel at once; the other one ends for want of a head."""
        self.close()
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return whether it has come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.poll() is not None

    def _write(self) -> None:
        """Say what is to be said, in a thread: a node may be slow to hear it."""
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
                    message = decode_from_node(line)
                except msgspec.DecodeError:  # a login shell's greeting
                    message = Said(line.rstrip() + b"\n")
                self._news.put(News(self.host, message))
                if isinstance(message, Ended):
                    self.close()
        code = self._process.wait()
        for _ in range(_LOOKS):  # a pause of the machine ends one of them, and not all
            self._complains.join(1.0 / _LOOKS)
        self._news.put(News(self.host, Gone(code, "; ".join(self._last_words))))

    def _keep_complaints(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").strip()
                opened = _ALLOCATED.match(text)
                if opened is not None:
                    self._news.put(News(self.host, Opened(int(opened[1]))))
                elif text:
                    self._last_words = [*self._last_words, text][-_LAST_WORDS:]
