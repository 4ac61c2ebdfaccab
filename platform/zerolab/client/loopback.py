"""Which addresses are this machine's own, and lead nowhere from another one."""

import ipaddress

__all__ = ["is_loopback"]


def is_loopback(host: str) -> bool:
    """Whether a name or an address is one of a machine's own loopback.

    Args:
        host: As ``urlsplit(...).hostname`` has it: without brackets.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
