"""How the launchers of a run find each other, and over which network its ranks speak.

Nobody guesses: the first machine serves the store, at an address and a port that all are told.
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

__all__ = ["meet", "name_interface"]

_MEET_S = 300.0
"""Longest wait for the first machine's launcher: it may be importing torch."""
_STAGED_S = 24 * 3600.0
"""The same where data is staged first: the first machine may take longer for it than others."""
_ANY_PORT = 9
"""A UDP socket that is only connected sends nothing, whatever the port."""


class _Meeting(RendezvousHandler):
    """One store for the launchers and for their ranks, on the first machine."""

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


def meet(run_id: str, nodes: Nodes | None, *, stages: bool = False) -> RendezvousHandler:
    """Return where the launchers of a run find each other; see :class:`_Meeting`.

    Args:
        run_id: Of the run; keys of another run are others.
        nodes: The machines; None for this one alone, with any free port.
        stages: Whether each of them has staged data, and may have taken long for it.

    Raises:
        PeerFailedError: If the store cannot be served here, or not be reached there.
    """
    wait_s = _STAGED_S if stages else _MEET_S
    return _Meeting(run_id, nodes or Nodes((1,), 0, "127.0.0.1", 0), wait_s)


def _open_store(nodes: Nodes, wait_s: float) -> TCPStore:
    serves = nodes.rank == 0
    place = f"{nodes.address}:{nodes.port}"
    try:
        return TCPStore(
            nodes.address,
            nodes.port,
            len(nodes.slots),
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=wait_s),
        )
    except (DistError, RuntimeError) as error:
        said = str(error).strip().splitlines()[0][:200]
        if serves:
            hint = "give another port (--master_port) if it is taken"
            raise PeerFailedError(
                f"port {nodes.port} cannot be listened on: {said}; {hint}"
            ) from error
        hint = "the first machine must be reachable there (--master_addr, --master_port)"
        raise PeerFailedError(f"{place} does not answer: {said}; {hint}") from error


def name_interface(nodes: Nodes | None) -> None:
    """Have the ranks of this machine speak over the network that leads to the first one.

    Without it gloo asks what the host's name resolves to, which need not be of use to others.
    Variables that are set already stay.
    """
    interface = "lo" if nodes is None else _interface_to(nodes.address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if nodes is not None:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _interface_to(address: str) -> str | None:
    """Name the interface whose address packets to ``address`` carry; None when there is none."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            own = probe.getsockname()[0]
    except OSError:
        return None  # the ranks will say that they do not find each other
    for name, places in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in places):
            return name
    return None
