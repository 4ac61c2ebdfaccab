"""Recognition of loopback addresses."""

import ipaddress

__all__ = ["is_loopback"]


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is a loopback address.

    Args:
        host: As in ``urlsplit(...).hostname``: without brackets.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
