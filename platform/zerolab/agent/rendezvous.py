"""Rendezvous address of a run on several agents, which the first agent reports."""

import socket
from urllib.parse import urlsplit

import msgspec

from zerolab.client.transport import is_loopback
from zerolab.contract.messages import RendezvousAddress
from zerolab.contract.spec import Nodes
from zerolab.linux import free_port

__all__ = ["offer_rendezvous", "replace_loopback"]


def offer_rendezvous(server: str) -> RendezvousAddress:
    """Choose the address of this machine towards the server, and a free port.

    Args:
        server: Address of the server.
    """
    return RendezvousAddress(_address_towards(server), free_port())


def _address_towards(server: str) -> str:
    parts = urlsplit(server)
    try:
        address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(address[0], address[1]) as probe:
            probe.connect(address[4])  # UDP: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def replace_loopback(nodes: Nodes, server: str) -> Nodes:
    """Replace a loopback address by the server's address.

    An agent on the server's machine may reach the server, and so itself, at a loopback address. The
    server's address as seen from here leads to that agent, too.

    Args:
        nodes: From the server.
        server: Address of the server, seen from here.
    """
    host = urlsplit(server).hostname or nodes.address
    if is_loopback(nodes.address) and not is_loopback(host):
        return msgspec.structs.replace(nodes, address=host)
    return nodes
