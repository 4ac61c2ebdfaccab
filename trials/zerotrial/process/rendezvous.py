"""Rendezvous of a run's launchers, and the network interface of its ranks.

The first machine serves the store, at an address and a port that the run's specification names.
"""

import logging
import os
import select
import socket
import sys
from datetime import timedelta
from typing import Any

import psutil

from zerolab.contract.spec import Nodes
from zerolab.errors import PeerFailedError

__all__ = ["LOCAL", "Rendezvous", "choose_network_interface"]

logger = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
"""Address of the rendezvous of a run on one machine."""
_STORE_TIMEOUT_S = 300.0
"""Seconds to wait for the first machine's launcher, which may be importing torch."""
_STAGING_TIMEOUT_S = 24 * 3600.0
"""The same if data is staged, which may take longer on the first machine than on others."""
_LEAVE_TIMEOUT_S = 300.0
"""Maximum wait for the ranks of other machines to end."""
_PROBE_PORT = 9
"""Any port: connecting a UDP socket sends nothing."""


class Rendezvous:
    """Store that the launchers and ranks of a run share; the first machine serves it.

    torch's rendezvous lets survivors form a smaller group. Here the scheduler alone chooses the
    members: a lost machine ends the run, and the trial restarts with other slots.

    Args:
        run_id: Id of the run.
        nodes: Machines of the run.
        staged: Whether the machines stage data first, which may take long.

    Raises:
        PeerFailedError: If the first machine cannot serve the store, or another cannot reach it.
    """

    def __init__(self, run_id: str, nodes: Nodes, *, staged: bool = False) -> None:
        self._nodes = nodes
        self._wait_s = _STAGING_TIMEOUT_S if staged else _STORE_TIMEOUT_S
        self._listener: socket.socket | None = None
        self._keys: Any = None
        if nodes.address == LOCAL and len(nodes.slots) == 1:
            self._listener = socket.create_server((LOCAL, nodes.port))
            self.port = int(self._listener.getsockname()[1])
            if "torch" in sys.modules:
                self.serve_store()
        else:
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            self._store = _open_store(nodes, self._wait_s)
            self.port = int(self._store.port)
            # The prefix keeps a launcher of an earlier run, which still knows the port, out of
            # this run's keys.
            self._keys = PrefixStore(run_id, self._store)

    def serve_store(self) -> None:
        """Serve the store now, if this has not happened yet; it imports torch."""
        if self._listener is not None:
            self._store = _open_store(self._nodes, self._wait_s, self._listener)
            self._listener = None

    def serve_requests(self) -> None:
        """Serve the store as soon as a rank connects; call this regularly.

        Importing torch takes seconds and 200 MB, and the ranks of many commands never connect.
        """
        if self._listener is not None and select.select([self._listener], [], [], 0)[0]:
            self.serve_store()

    def join(self) -> None:
        """Wait until the launchers of all machines are here.

        Raises:
            RuntimeError: If one is missing after the timeout.
        """
        if self._keys is not None:
            self._keys.set(f"joined/{self._nodes.rank}", "")
            self._keys.wait([f"joined/{rank}" for rank in range(len(self._nodes.slots))])

    def leave(self) -> None:
        """Wait until the ranks of all machines have succeeded, up to a timeout.

        The store ends with the first machine's launcher, and the others' ranks may still need it.
        """
        if self._keys is None:
            return
        try:
            if self._keys.add("left", 1) == len(self._nodes.slots):
                self._keys.set("all_left", "")
            self._keys.wait(["all_left"], timedelta(seconds=_LEAVE_TIMEOUT_S))
        except RuntimeError:
            logger.exception("the other machines' ranks have not ended")


def _open_store(nodes: Nodes, wait_s: float, listener: socket.socket | None = None) -> Any:
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    is_server = nodes.rank == 0
    port = nodes.port if listener is None else listener.getsockname()[1]
    try:
        return TCPStore(
            nodes.address, port, len(nodes.slots), is_master=is_server,
            wait_for_workers=False, timeout=timedelta(seconds=wait_s),
            master_listen_fd=None if listener is None else listener.detach(),
        )  # fmt: skip
    except (DistError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        if is_server:
            hint = "give another port (--master_port) if it is taken"
            raise PeerFailedError(f"port {port} cannot be listened on: {reason}; {hint}") from error
        problem = f"{nodes.address}:{port} does not answer: {reason}"
        hint = "the first machine must be reachable there (--master_addr, --master_port)"
        raise PeerFailedError(f"{problem}; {hint}") from error


def choose_network_interface(nodes: Nodes | None) -> None:
    """Let the ranks of this machine communicate over the interface that leads to the first one.

    By default gloo uses the address of the host's name, which other machines may not reach.
    Environment variables that are set already take precedence.
    """
    interface = "lo" if nodes is None else _interface_to(nodes.address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if nodes is not None:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _interface_to(address: str) -> str | None:
    """Return the interface that routes packets to ``address``; None if there is none."""
    try:
        results = socket.getaddrinfo(address, _PROBE_PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = results[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            source = probe.getsockname()[0]
    except OSError:
        return None  # the ranks report that they cannot connect
    for name, addresses in psutil.net_if_addrs().items():
        # link-local IPv6 addresses end with "%" and the interface's name
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            return name
    return None
