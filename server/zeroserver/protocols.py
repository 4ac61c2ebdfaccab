"""Protocols of other programs whose clients call routes of extensions."""

from collections.abc import Callable
from typing import Any

import msgspec

__all__ = ["PROTOCOLS", "Protocol", "protocol_of"]


class Protocol(msgspec.Struct, frozen=True):
    """Conventions of another program's protocol, for routes that its clients call.

    Args:
        error: Function that creates the body of an error from its status, type and message.
        files: Prefix of the routes that receive whole files.
        max_file_bytes: Maximum number of bytes of a file.
    """

    error: Callable[[int, str, str], dict[str, Any]]
    files: str
    max_file_bytes: int


PROTOCOLS: dict[str, Protocol] = {}
"""Path prefix to the protocol of its routes; they accept a token as the password of basic
authentication, too."""


def protocol_of(path: str) -> Protocol | None:
    """Return the protocol of a path; None if it is ours."""
    for prefix, protocol in PROTOCOLS.items():
        if path.startswith(prefix):
            return protocol
    return None
