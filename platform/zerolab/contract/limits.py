"""Sizes of what describes an experiment, the same in its file and in every request."""

__all__ = [
    "ARCHIVE_BYTES",
    "LABELS",
    "LABEL_CHARACTERS",
    "LOG_POLICIES",
    "NAME_CHARACTERS",
    "SLOTS",
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
