"""Rendezvous of a run's launchers, and the network interface of its ranks.

The first machine serves the store, at an address and a port that the run's specification names.
"""

import os
import socket
from datetime import timedelta

import psutil
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from zerolab.contract.spec import Nodes
from zerolab.errors import PeerFailedError

__all__ = ["choose_network_interface", "create_rendezvous"]

_STORE_TIMEOUT_S = 300.0
"""Seconds to wait for the first machine's launcher, which may be importing torch."""
_STAGING_TIMEOUT_S = 24 * 3600.0
"""The same if data is staged, which may take longer on the first machine than on others."""
_PROBE_PORT = 9
"""Any port: connecting a UDP socket sends nothing."""


class _StaticRendezvous(RendezvousHandler):
    """Rendezvous with fixed ranks; launchers and ranks share one store on the first machine."""

    def __init__(self, run_id: str, nodes: Nodes, wait_s: float) -> None:
        self._run_id = run_id
        self._nodes = nodes
        self._store = _open_store(nodes, wait_s)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "zerolab"

    def next_rendezvous(self) -> RendezvousInfo:
        # torch's rendezvous lets survivors form a smaller group. Here the scheduler alone chooses
        # the members: a lost machine ends the run, and the trial restarts with other slots. The
        # prefix keeps a launcher of an earlier run, which still knows the port, out of this one's
        # keys.
        # The specification has the ranks of all nodes, so nothing is negotiated.
        nodes = self._nodes
        address = RendezvousStoreInfo(nodes.address, self._store.port)
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, nodes.rank, len(nodes.slots), address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def create_rendezvous(
    run_id: str, nodes: Nodes | None, *, staged: bool = False
) -> RendezvousHandler:
    """Create the rendezvous of a run's launchers.

    Args:
        run_id: Id of the run, which prefixes the keys in the store.
        nodes: Machines of the run; None for a single one, with any free port.
        staged: Whether the machines stage data first, which may take long.

    Raises:
        PeerFailedError: If the first machine cannot serve the store, or another cannot reach it.
    """
    wait_s = _STAGING_TIMEOUT_S if staged else _STORE_TIMEOUT_S
    return _StaticRendezvous(run_id, nodes or Nodes((1,), 0, "127.0.0.1", 0), wait_s)


def _open_store(nodes: Nodes, wait_s: float) -> TCPStore:
    is_server = nodes.rank == 0
    address = f"{nodes.address}:{nodes.port}"
    try:
        return TCPStore(
            nodes.address,
            nodes.port,
            len(nodes.slots),
            is_master=is_server,
            wait_for_workers=False,
            timeout=timedelta(seconds=wait_s),
        )
    except (DistError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        if is_server:
            hint = "give another port (--master_port) if it is taken"
            raise PeerFailedError(
                f"port {nodes.port} cannot be listened on: {reason}; {hint}"
            ) from error
        hint = "the first machine must be reachable there (--master_addr, --master_port)"
        raise PeerFailedError(f"{address} does not answer: {reason}; {hint}") from error


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
