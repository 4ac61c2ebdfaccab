"""Validation of port numbers."""

__all__ = ["read_port"]

_LAST = 65535


def read_port(text: str) -> int:
    """Read a port; 0 means any free one.

    Raises:
        ValueError: If the text is not a port.
    """
    if not (text.isascii() and text.isdecimal() and int(text) <= _LAST):
        msg = f"must be a whole number from 0 to {_LAST}, got {text!r}"
        raise ValueError(msg)
    return int(text)
