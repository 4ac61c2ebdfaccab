"""Check of the addresses to which messages are sent: a channel must not reach internal services."""

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

__all__ = ["AddressError", "address_problem", "resolve", "url_problem"]

_METADATA = frozenset(
    ipaddress.ip_address(text) for text in ("169.254.169.254", "fd00:ec2::254", "100.100.100.200")
)
"""Addresses at which clouds show credentials of their machines."""
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that translate to an IPv4 address behind a NAT64."""
_OPTION = "start the server with --allow-private-webhooks to permit it"

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressError(Exception):
    """The host of a URL is unknown, or its address is not permitted; never contains the URL."""


def address_problem(text: str, *, allow_private: bool) -> str | None:
    """Return why no message may be sent to an address; None if it is permitted.

    Args:
        text: IPv4 or IPv6 address.
        allow_private: Whether private networks and this machine are permitted.
    """
    address = _plain(ipaddress.ip_address(text.partition("%")[0]))
    if address in _METADATA or address.is_link_local:
        return f"must not have a link-local or metadata address, got {address}"
    if not address.is_loopback and (
        address.is_multicast or address.is_unspecified or address.is_reserved
    ):
        return f"must have the address of one machine, got {address}"
    if address.is_global or allow_private:
        return None
    return f"must have a public address, got {address}; {_OPTION}"


def _plain(address: _Address) -> _Address:
    """Return the IPv4 address that an IPv6 address contains, else the address."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else address)


def url_problem(url: str) -> str | None:
    """Return why a URL cannot be that of a webhook, without the URL; None if it can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "must be a URL with a valid host and port"
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return "must begin with https:// or http:// and a host"
    if port == 0:
        return "must have a port from 1 to 65535, got 0"
    if parts.username is not None or parts.password is not None:
        return "must not contain a user or password; put a token into its path or query"
    if not (url.isascii() and url.isprintable()) or " " in url:
        return "must consist of printable ASCII characters without blanks"
    return None


async def resolve(url: str, *, allow_private: bool) -> str:
    """Return the address of the host of a webhook's URL.

    All addresses of the host must be permitted. The caller connects to the returned one, since a
    second look-up could give another.

    Args:
        url: Valid URL of a webhook.
        allow_private: Whether private networks and this machine are permitted.

    Raises:
        AddressError: If the host is unknown or one of its addresses is not permitted.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    try:
        resolved = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise AddressError("its host must be known to the DNS of the server") from None
    addresses = [str(item[4][0]) for item in resolved]
    for address in addresses:
        if problem := address_problem(address, allow_private=allow_private):
            raise AddressError(f"its host {problem}")
    return addresses[0]
