"""Coordinator of a run on several machines: starts and supervises a worker on each.

The failure of a node ends all nodes, and so does the end of the coordinator.
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
from zerolab.extensions.launcher_ssh.channel import (
    Channel,
    ChannelClosed,
    NodeMessage,
    TunnelOpened,
    local_command,
    ssh_command,
)
from zerolab.extensions.launcher_ssh.messages import (
    BEAT_S,
    SUSPENDED_S,
    Beat,
    Ended,
    Hello,
    Job,
    RankOutput,
    SpoolPiece,
    Stop,
)
from zerolab.extensions.launcher_ssh.tunnel import Tunnel

__all__ = ["DEFAULT_PORT", "Coordinator", "LaunchPlan", "MachineSlots"]

_WAIT_S = 0.1
_AFTER_GRACE_S = 10.0
"""Seconds for a node to report its outcome after the grace period of its ranks."""
_FAILURE_GRACE_S = 5.0
"""Grace period of ranks after another node failed, in seconds: they cannot save a checkpoint."""
DEFAULT_PORT = 29500
"""Default rendezvous port, as in DeepSpeed and torchrun."""


@dataclass(frozen=True)
class MachineSlots:
    """A machine of the run with its slots."""

    host: str
    slots: Sequence[int]
    local: bool = False
    """It is this machine and needs no ssh."""


@dataclass(frozen=True)
class LaunchPlan:
    """Runs a plan once."""

    places: Sequence[MachineSlots]
    """Machines, in the order of their ranks."""
    run: RunSpec
    """Run specification: command, directory and grace period of every rank."""
    archive: bytes = b""
    """The model directory as tar.gz, if the machines do not see that of ``run``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are sent to every node."""
    address: str = ""
    """Rendezvous address; determined automatically if empty."""
    port: int | None = None
    """Rendezvous port; 0 for any free one. None means 29500 for several machines, any free one for
    a single one."""
    nodes: Nodes | None = None
    """Set if this is one of several machines, each with its own coordinator."""
    python: str = ""
    ssh_config: Path | None = None
    ssh_port: int | None = None
    tunnel: Tunnel | None = None
    """Tunnel to the server of an experiment, if only this machine reaches it."""
    silence_s: float = 30.0
    """Seconds without a heartbeat after which a node or a coordinator is lost."""
    start_s: float = 60.0
    """Maximum wait for a node's process to start, in seconds."""


class Coordinator:
    """Runs a plan once.

    Args:
        plan: The plan.
        show: Receives the output of every rank, with the host.
        keep: Receives undelivered reports of an experiment's ranks.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        show: Callable[[str, RankOutput], None],
        keep: Callable[[SpoolPiece], None] | None = None,
    ) -> None:
        self._plan = plan
        self._show = show
        self._keep = keep
        self._ports: dict[str, int] = {}
        self._messages: queue.Queue[NodeMessage] = queue.Queue()
        self._channels: dict[str, Channel] = {}
        self._hello: dict[str, Hello] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._stop_at: float | None = None
        self._stop_requests = 0
        self._beat_at = 0.0
        self._supervised_at = 0.0
        self._lost: list[str] = []
        self.begun = False
        """Whether the machines have received their jobs."""

    @property
    def lost(self) -> list[str]:
        """Hosts that could not be reached, or were lost before they reported an outcome."""
        return list(self._lost)

    def stop(self) -> None:
        """Stop the ranks, on a second call immediately; may be called by a signal handler."""
        self._stop_requests += 1

    def run(self) -> tuple[str, Outcome]:
        """Run all nodes to their end; return the deciding node and its outcome."""
        try:
            for machine in self._plan.places:
                self._channels[machine.host] = Channel(
                    machine.host, self._node_command(machine), self._messages
                )
            if self._wait_for_nodes():
                self.begun = True
                self._send_jobs()
            while len(self._outcomes) < len(self._channels):
                self._supervise()
        finally:
            self._close()
        return merge_outcomes(self._outcomes)

    def _node_command(self, machine: MachineSlots) -> list[str]:
        if machine.local:
            return local_command()
        plan = self._plan
        return ssh_command(
            machine.host,
            python=plan.python,
            config=plan.ssh_config,
            port=plan.ssh_port,
            tunnel=plan.tunnel,
        )

    def _wait_for_nodes(self) -> bool:
        """Wait until all nodes have connected; return whether they have."""
        deadline = time.monotonic() + self._plan.start_s
        while self._missing_hosts() and not self._outcomes and not self._stop_requests:
            before = time.monotonic()
            self._receive_messages()
            now = time.monotonic()
            if now - before > SUSPENDED_S:
                # This machine was suspended: the nodes could not connect in this time.
                deadline += now - before
            elif now > deadline:
                for host in self._missing_hosts():
                    self._mark_lost(host, f"it did not start within {self._plan.start_s:g} s")
        if self._outcomes or self._stop_requests:
            for host in self._channels.keys() - self._outcomes.keys():
                self._record_outcome(
                    host, Outcome(-15, "the run was stopped before it started", was_stopped=True)
                )
            return False
        return True

    def _missing_hosts(self) -> set[str]:
        """Return the hosts that are not connected yet, or have no tunnel to the server."""
        tunnels = {machine.host for machine in self._plan.places if not machine.local}
        if self._plan.tunnel is None:
            tunnels = set()
        return (self._channels.keys() - self._hello.keys()) | (tunnels - self._ports.keys())

    def _run_for(self, machine: MachineSlots) -> RunSpec:
        """Return the run specification for a machine, with the server's address at its tunnel."""
        port = self._ports.get(machine.host)
        tunnel = self._plan.tunnel
        if port is None or tunnel is None:
            return self._plan.run
        return msgspec.structs.replace(self._plan.run, master=tunnel.address(port))

    def _send_jobs(self) -> None:
        plan = self._plan
        several = len(plan.places) > 1
        sizes = tuple(len(machine.slots) for machine in plan.places)
        port = plan.port if plan.port is not None else DEFAULT_PORT if several else 0
        if several and port == 0:
            port = self._hello[plan.places[0].host].port
        address = plan.address or self._rendezvous_address()
        names = tuple(machine.host.rpartition("@")[2] for machine in plan.places)
        for rank, machine in enumerate(plan.places):
            job = Job(
                run=msgspec.structs.replace(self._run_for(machine), host_names=names),
                archive=plan.archive,
                environment=dict(plan.environment),
                nodes=plan.nodes or Nodes(sizes, rank, address, port),
                slots=tuple(machine.slots),
                silence_s=plan.silence_s,
            )
            self._channels[machine.host].send(job)

    def _rendezvous_address(self) -> str:
        """Return the address of the first machine, from the ssh connections."""
        first, *remaining = self._plan.places
        if not remaining:
            return "127.0.0.1"
        seen = self._hello[remaining[0].host] if first.local else self._hello[first.host]
        endpoints = seen.connection.split()
        if len(endpoints) != 4:  # this machine under two names
            return "127.0.0.1"
        return endpoints[0] if first.local else endpoints[2]

    def _supervise(self) -> None:
        self._receive_messages()
        now = time.monotonic()
        if now - self._supervised_at > SUSPENDED_S:
            # After a suspension, heartbeats may wait in the queue: do not count the pause.
            for channel in self._channels.values():
                channel.heard = now
        self._supervised_at = now
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            for host in self._open_hosts():
                self._channels[host].send(Beat())
        failed = [end for end in self._outcomes.values() if end.exit_code != 0]
        if (failed or self._stop_requests) and self._stop_at is None:
            self._stop(self._plan.run.grace_s if self._stop_requests else _FAILURE_GRACE_S)
        elif self._stop_requests > 1:
            self._stop_requests = 1
            self._stop(0.0)
        for host in self._open_hosts():
            if now - self._channels[host].heard > self._plan.silence_s:
                self._mark_lost(host, f"it gave no sign of life for {self._plan.silence_s:g} s")
            elif self._stop_at is not None and now > self._stop_at:
                self._mark_lost(host, "it did not end after it was stopped")

    def _stop(self, grace_s: float) -> None:
        self._stop_at = time.monotonic() + grace_s + _AFTER_GRACE_S
        for host in self._open_hosts():
            self._channels[host].send(Stop(grace_s))

    def _open_hosts(self) -> list[str]:
        return [host for host in self._channels if host not in self._outcomes]

    def _receive_messages(self) -> None:
        try:
            host, message = self._messages.get(timeout=_WAIT_S)
            while True:
                self._handle_message(host, message)
                host, message = self._messages.get_nowait()
        except queue.Empty:
            return

    def _handle_message(self, host: str, message: object) -> None:
        if isinstance(message, RankOutput):
            self._show(host, message)
        elif isinstance(message, Hello):
            self._hello[host] = message
            if message.version != __version__:
                other = f"has zerolab {message.version}, this machine {__version__}"
                self._record_outcome(
                    host, Outcome(EXIT_USER_ERROR, f"{other}; install the same one")
                )
        elif isinstance(message, TunnelOpened):
            self._ports[host] = message.port
        elif isinstance(message, SpoolPiece):
            if self._keep is not None:
                self._keep(message)
        elif isinstance(message, Ended):
            self._outcomes.setdefault(host, message.outcome)
        elif isinstance(message, ChannelClosed) and host not in self._outcomes:
            self._handle_closed(host, message)

    def _handle_closed(self, host: str, closed: ChannelClosed) -> None:
        suffix = f": {closed.stderr}" if closed.stderr else ""
        if host not in self._hello:
            hint = _HINTS.get(closed.exit_code, "")
            reason = (
                f"its process could not be started (exit code {closed.exit_code}){suffix}{hint}"
            )
            if closed.exit_code == _SSH_FAILED and any(word in suffix for word in _AWAY):
                self._mark_lost(host, reason)
            else:
                self._record_outcome(host, Outcome(EXIT_USER_ERROR, reason))
        else:
            self._mark_lost(host, f"its connection ended{suffix}")

    def _mark_lost(self, host: str, reason: str) -> None:
        self._lost.append(host)
        self._record_outcome(host, Outcome(EXIT_INFRASTRUCTURE, f"the node is lost: {reason}"))

    def _record_outcome(self, host: str, outcome: Outcome) -> None:
        self._outcomes[host] = outcome
        self._channels[host].kill()

    def _close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        deadline = time.monotonic() + _AFTER_GRACE_S
        for channel in self._channels.values():
            if not channel.wait(max(0.0, deadline - time.monotonic())):
                channel.kill()
        while not self._messages.empty():
            host, message = self._messages.get_nowait()
            if isinstance(message, RankOutput):
                self._show(host, message)


_HINTS = {
    127: "; zerolab must be installed there at the same place, or name its python with --python",
}
_SSH_FAILED = 255
_AWAY = (
    "Connection refused", "timed out", "No route to host", "Network is unreachable",
    "Connection reset", "Connection closed", "Broken pipe",
)  # fmt: skip
"""Messages of ssh for machines that may be available later."""
