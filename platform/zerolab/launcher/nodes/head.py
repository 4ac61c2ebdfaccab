"""The head of a run on several machines: starts a node's process on each, and watches all.

The failure of one ends all of them, and so does the end of the head itself: nothing is left.
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerolab import __version__
from zerolab.contract.nodes import merge_outcomes
from zerolab.contract.outcome import Outcome
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_USER_ERROR, Command, Nodes
from zerolab.launcher.nodes.channel import Channel, Gone, News, local_words, ssh_words
from zerolab.launcher.nodes.messages import BEAT_S, Beat, Ended, Hello, Job, Said, Stop

__all__ = ["DEFAULT_PORT", "Head", "Place", "Plan"]

_WAIT_S = 0.1
_AFTER_GRACE_S = 10.0
"""For a node to say how it ended, in seconds, when the grace of its ranks is over."""
_FAILURE_GRACE_S = 5.0
"""For ranks to end when those of another node have failed, in seconds: they can save nothing."""
DEFAULT_PORT = 29500
"""DeepSpeed's, and torchrun's."""


@dataclass(frozen=True)
class Place:
    """A machine of the run."""

    host: str
    slots: Sequence[int]
    local: bool = False
    """It is this machine: no ssh."""


@dataclass(frozen=True)
class Plan:
    """What shall run where."""

    places: Sequence[Place]
    """In the order of their ranks."""
    command: Command
    directory: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Sent to every node."""
    address: str = ""
    """Where the ranks meet; found out when empty."""
    port: int | None = None
    """29500 for several machines, any free one for a single one, when None."""
    alone: Nodes | None = None
    """This is one of several machines, and each has a head of its own."""
    python: str = ""
    ssh_config: Path | None = None
    ssh_port: int | None = None
    grace_s: float = 30.0
    """Seconds that ranks have to checkpoint and end."""
    silence_s: float = 30.0
    """A node, or a head, that is silent for so long is taken for gone."""
    start_s: float = 60.0
    """Longest wait for a node's process to be there."""


class Head:
    """Runs a plan once.

    Args:
        plan: What shall run where.
        show: Told every line that a rank writes, with the host.
    """

    def __init__(self, plan: Plan, show: Callable[[str, Said], None]) -> None:
        self._plan = plan
        self._show = show
        self._news: queue.Queue[News] = queue.Queue()
        self._channels: dict[str, Channel] = {}
        self._hello: dict[str, Hello] = {}
        self._ends: dict[str, Outcome] = {}
        self._stop_at: float | None = None
        self._asked = 0
        self._beat_at = 0.0

    @property
    def lost(self) -> list[str]:
        """Hosts that did not live to say how their ranks ended."""
        return [host for host, end in self._ends.items() if end.exit_code == EXIT_INFRASTRUCTURE]

    def stop(self) -> None:
        """Have the ranks end, a second time at once; may be called by a signal handler."""
        self._asked += 1

    def run(self) -> tuple[str, Outcome]:
        """Start, watch and end all nodes; return which of them decided how it ended, and how."""
        try:
            for place in self._plan.places:
                self._channels[place.host] = Channel(place.host, self._words(place), self._news)
            if self._meet():
                self._send_jobs()
            while len(self._ends) < len(self._channels):
                self._turn()
        finally:
            self._close()
        return merge_outcomes(self._ends)

    def _words(self, place: Place) -> list[str]:
        if place.local:
            return local_words()
        plan = self._plan
        return ssh_words(place.host, python=plan.python, config=plan.ssh_config, port=plan.ssh_port)

    def _meet(self) -> bool:
        """Wait until all nodes are there; return whether they are."""
        deadline = time.monotonic() + self._plan.start_s
        while len(self._hello) < len(self._channels) and not self._ends and not self._asked:
            self._hear()
            if time.monotonic() > deadline:
                for host in self._channels.keys() - self._hello.keys():
                    self._end(host, _lost(f"did not start within {self._plan.start_s:g} s"))
        if self._ends or self._asked:
            for host in self._channels.keys() - self._ends.keys():
                self._end(host, Outcome(-15, "the run was stopped before it began", told=True))
            return False
        return True

    def _send_jobs(self) -> None:
        plan = self._plan
        several = len(plan.places) > 1
        sizes = tuple(len(place.slots) for place in plan.places)
        port = plan.port if plan.port is not None else DEFAULT_PORT if several else 0
        address = plan.address or self._address()
        for rank, place in enumerate(plan.places):
            job = Job(
                command=plan.command,
                directory=plan.directory,
                environment=dict(plan.environment),
                nodes=plan.alone or Nodes(sizes, rank, address, port),
                slots=tuple(place.slots),
                grace_s=plan.grace_s,
                silence_s=plan.silence_s,
            )
            self._channels[place.host].send(job)

    def _address(self) -> str:
        """Where the first machine is reached: as the ssh connections have it."""
        first, *others = self._plan.places
        if not others:
            return "127.0.0.1"
        seen = self._hello[others[0].host] if first.local else self._hello[first.host]
        words = seen.connection.split()
        if len(words) != 4:  # this machine twice, under two names
            return "127.0.0.1"
        return words[0] if first.local else words[2]

    def _turn(self) -> None:
        self._hear()
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            for host in self._open():
                self._channels[host].send(Beat())
        failed = [end for end in self._ends.values() if end.exit_code != 0]
        if (failed or self._asked) and self._stop_at is None:
            self._stop(self._plan.grace_s if self._asked else _FAILURE_GRACE_S)
        elif self._asked > 1:
            self._asked = 1
            self._stop(0.0)
        for host in self._open():
            if now - self._channels[host].heard > self._plan.silence_s:
                self._end(host, _lost(f"gave no sign of life for {self._plan.silence_s:g} s"))
            elif self._stop_at is not None and now > self._stop_at:
                self._end(host, _lost("did not end when it was told to"))

    def _stop(self, grace_s: float) -> None:
        self._stop_at = time.monotonic() + grace_s + _AFTER_GRACE_S
        for host in self._open():
            self._channels[host].send(Stop(grace_s))

    def _open(self) -> list[str]:
        return [host for host in self._channels if host not in self._ends]

    def _hear(self) -> None:
        try:
            host, message = self._news.get(timeout=_WAIT_S)
            while True:
                self._take(host, message)
                host, message = self._news.get_nowait()
        except queue.Empty:
            return

    def _take(self, host: str, message: object) -> None:
        if isinstance(message, Said):
            self._show(host, message)
        elif isinstance(message, Hello):
            self._hello[host] = message
            if message.version != __version__:
                other = f"has zerolab {message.version}, this machine {__version__}"
                self._end(host, Outcome(EXIT_USER_ERROR, f"{other}; install the same one"))
        elif isinstance(message, Ended):
            self._ends.setdefault(host, message.outcome)
        elif isinstance(message, Gone):
            self._ends.setdefault(host, self._gone(host, message))

    def _gone(self, host: str, gone: Gone) -> Outcome:
        said = f": {gone.said}" if gone.said else ""
        if host not in self._hello:
            hint = _HINTS.get(gone.exit_code, "")
            return Outcome(
                EXIT_USER_ERROR,
                f"its process could not be started (exit code {gone.exit_code}){said}{hint}",
            )
        return Outcome(EXIT_INFRASTRUCTURE, f"the node is lost: its connection ended{said}")

    def _end(self, host: str, outcome: Outcome) -> None:
        self._ends[host] = outcome
        self._channels[host].kill()

    def _close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        deadline = time.monotonic() + _AFTER_GRACE_S
        for channel in self._channels.values():
            if not channel.wait(max(0.0, deadline - time.monotonic())):
                channel.kill()
        while not self._news.empty():
            host, message = self._news.get_nowait()
            if isinstance(message, Said):
                self._show(host, message)


_HINTS = {
    127: "; zerolab must be installed there at the same place, or name its python with --python",
}


def _lost(why: str) -> Outcome:
    return Outcome(EXIT_INFRASTRUCTURE, f"the node is lost: it {why}")
