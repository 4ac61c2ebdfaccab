"""Where the ranks of a run on several agents meet: on the first of them, which tells the server."""

import socket
from urllib.parse import urlsplit

import msgspec

from zerolab.client.loopback import is_loopback
from zerolab.contract.messages import RendezvousAddress
from zerolab.contract.spec import Nodes
from zerolab.linux import free_port

__all__ = ["as_seen_from_here", "offer_place"]


def offer_place(server: str) -> RendezvousAddress:
    """Choose an address of this machine, the one that leads to the server, and a free port.

    Args:
        server: Address of the server.
    """
    return RendezvousAddress(_own_address(server), free_port())


def _own_address(server: str) -> str:
    parts = urlsplit(server)
    try:
        place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(place[0], place[1]) as probe:
            probe.connect(place[4])  # UDP: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def as_seen_from_here(nodes: Nodes, server: str) -> Nodes:
    """Put the server's address in the place of a loopback one.

    An agent on the server's own machine finds the server, and so itself, at an address that means
    nothing elsewhere; where the server is, seen from here, that agent is too.

    Args:
        nodes: As the server told them.
        server: Address of the server, seen from here.
    """
    host = urlsplit(server).hostname or nodes.address
    if is_loopback(nodes.address) and not is_loopback(host):
        return msgspec.structs.replace(nodes, address=host)
    return nodes
