"""The head of a run on several machines: starts a node's process on each, and watches all.

The failure of one ends all of them, and so does the end of the head itself: nothing is left.
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from zerolab import __version__
from zerolab.contract.nodes import merge_outcomes
from zerolab.contract.outcome import Outcome
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_USER_ERROR, Nodes, RunSpec
from zerolab.launcher.nodes.channel import (
    Channel,
    Gone,
    News,
    Opened,
    local_words,
    ssh_words,
)
from zerolab.launcher.nodes.messages import (
    BEAT_S,
    HELD_UP_S,
    Beat,
    Ended,
    Hello,
    Job,
    Left,
    Said,
    Stop,
)
from zerolab.launcher.nodes.tunnel import Tunnel

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
    run: RunSpec
    """What every rank runs, and where; with how much time to checkpoint and end."""
    archive: bytes = b""
    """The model directory as tar.gz, where the machines do not see that of ``run``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Sent to every node."""
    address: str = ""
    """Where the ranks meet; found out when empty."""
    port: int | None = None
    """29500 for several machines, any free one for a single one, when None; 0 is any free one."""
    alone: Nodes | None = None
    """This is one of several machines, and each has a head of its own."""
    python: str = ""
    ssh_config: Path | None = None
    ssh_port: int | None = None
    tunnel: Tunnel | None = None
    """To the server of an experiment, where only this machine reaches it."""
    silence_s: float = 30.0
    """A node, or a head, that is silent for so long is taken for gone."""
    start_s: float = 60.0
    """Longest wait for a node's process to be there."""


class Head:
    """Runs a plan once.

    Args:
        plan: What shall run where.
        show: Told what every rank writes, as it comes, with the host.
        keep: Told what the ranks of an experiment have left to report.
    """

    def __init__(
        self,
        plan: Plan,
        show: Callable[[str, Said], None],
        keep: Callable[[Left], None] | None = None,
    ) -> None:
        self._plan = plan
        self._show = show
        self._keep = keep
        self._ports: dict[str, int] = {}
        self._news: queue.Queue[News] = queue.Queue()
        self._channels: dict[str, Channel] = {}
        self._hello: dict[str, Hello] = {}
        self._ends: dict[str, Outcome] = {}
        self._stop_at: float | None = None
        self._asked = 0
        self._beat_at = 0.0
        self._turned_at = 0.0
        self._lost: list[str] = []
        self.begun = False
        """Whether the machines were told to start ranks."""

    @property
    def lost(self) -> list[str]:
        """Hosts that could not be reached, or did not live to say how their ranks ended."""
        return list(self._lost)

    def stop(self) -> None:
        """Have the ranks end, a second time at once; may be called by a signal handler."""
        self._asked += 1

    def run(self) -> tuple[str, Outcome]:
        """Start, watch and end all nodes; return which of them decided how it ended, and how."""
        try:
            for place in self._plan.places:
                self._channels[place.host] = Channel(place.host, self._words(place), self._news)
            if self._meet():
                self.begun = True
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
        return ssh_words(
            place.host,
            python=plan.python,
            config=plan.ssh_config,
            port=plan.ssh_port,
            tunnel=plan.tunnel,
        )

    def _meet(self) -> bool:
        """Wait until all nodes are there; return whether they are."""
        deadline = time.monotonic() + self._plan.start_s
        while self._missing() and not self._ends and not self._asked:
            before = time.monotonic()
            self._hear()
            now = time.monotonic()
            if now - before > HELD_UP_S:
                deadline += now - before
            elif now > deadline:
                for host in self._missing():
                    self._lose(host, f"it did not start within {self._plan.start_s:g} s")
        if self._ends or self._asked:
            for host in self._channels.keys() - self._ends.keys():
                self._end(host, Outcome(-15, "the run was stopped before it began", told=True))
            return False
        return True

    def _missing(self) -> set[str]:
        """Hosts that are not there yet, or from which no way leads to the server."""
        tunnels = {place.host for place in self._plan.places if not place.local}
        if self._plan.tunnel is None:
            tunnels = set()
        return (self._channels.keys() - self._hello.keys()) | (tunnels - self._ports.keys())

    def _run_of(self, place: Place) -> RunSpec:
        """What a machine is told of the run: the server's address is that of its own tunnel."""
        port = self._ports.get(place.host)
        tunnel = self._plan.tunnel
        if port is None or tunnel is None:
            return self._plan.run
        return msgspec.structs.replace(self._plan.run, master=tunnel.address(port))

    def _send_jobs(self) -> None:
        plan = self._plan
        several = len(plan.places) > 1
        sizes = tuple(len(place.slots) for place in plan.places)
        port = plan.port if plan.port is not None else DEFAULT_PORT if several else 0
        if several and port == 0:
            port = self._hello[plan.places[0].host].port
        address = plan.address or self._address()
        names = tuple(place.host.rpartition("@")[2] for place in plan.places)
        for rank, place in enumerate(plan.places):
            job = Job(
                run=msgspec.structs.replace(self._run_of(place), host_names=names),
                archive=plan.archive,
                environment=dict(plan.environment),
                nodes=plan.alone or Nodes(sizes, rank, address, port),
                slots=tuple(place.slots),
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
        if now - self._turned_at > HELD_UP_S:
            for channel in self._channels.values():
                channel.heard = now
        self._turned_at = now
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            for host in self._open():
                self._channels[host].send(Beat())
        failed = [end for end in self._ends.values() if end.exit_code != 0]
        if (failed or self._asked) and self._stop_at is None:
            self._stop(self._plan.run.grace_s if self._asked else _FAILURE_GRACE_S)
        elif self._asked > 1:
            self._asked = 1
            self._stop(0.0)
        for host in self._open():
            if now - self._channels[host].heard > self._plan.silence_s:
                self._lose(host, f"it gave no sign of life for {self._plan.silence_s:g} s")
            elif self._stop_at is not None and now > self._stop_at:
                self._lose(host, "it did not end when it was told to")

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
        elif isinstance(message, Opened):
            self._ports[host] = message.port
        elif isinstance(message, Left):
            if self._keep is not None:
                self._keep(message)
        elif isinstance(message, Ended):
            self._ends.setdefault(host, message.outcome)
        elif isinstance(message, Gone) and host not in self._ends:
            self._gone(host, message)

    def _gone(self, host: str, gone: Gone) -> None:
        said = f": {gone.said}" if gone.said else ""
        if host not in self._hello:
            hint = _HINTS.get(gone.exit_code, "")
            why = f"its process could not be started (exit code {gone.exit_code}){said}{hint}"
            if gone.exit_code == _SSH_FAILED and any(word in said for word in _AWAY):
                self._lose(host, why)
            else:
                self._end(host, Outcome(EXIT_USER_ERROR, why))
        else:
            self._lose(host, f"its connection ended{said}")

    def _lose(self, host: str, why: str) -> None:
        self._lost.append(host)
        self._end(host, Outcome(EXIT_INFRASTRUCTURE, f"the node is lost: {why}"))

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


_SSH_FAILED = 255
_AWAY = (
    "Connection refused", "timed out", "No route to host", "Network is unreachable",
    "Connection reset", "Connection closed", "Broken pipe",
)  # fmt: skip
"""What ssh says of a machine that is not there now, and may be later."""
