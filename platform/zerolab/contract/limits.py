"""Limits that are the same in files and requests: sizes of an experiment, ports."""

__all__ = [
    "ARCHIVE_BYTES",
    "LABELS",
    "LABEL_CHARACTERS",
    "LOG_POLICIES",
    "NAME_CHARACTERS",
    "SLOTS",
    "read_port",
]

NAME_CHARACTERS = 255
"""Longest name of an experiment."""
LABELS = 100
"""Most labels of an experiment."""
LABEL_CHARACTERS = 255
"""Longest label."""
SLOTS = 16_384
"""Most slots of an agent, and of a trial."""
LOG_POLICIES = 100
"""Most log policies of an experiment: each is searched in every line of its trials' logs."""
ARCHIVE_BYTES = 96 * 1024**2
"""Most bytes of a model directory: of its files together, and of the archive that they make."""
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
