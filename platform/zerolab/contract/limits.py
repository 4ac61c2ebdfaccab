"""Sizes of what describes an experiment, the same in its file and in every request."""

__all__ = ["ARCHIVE_BYTES", "LABELS", "LABEL_CHARACTERS", "NAME_CHARACTERS"]

NAME_CHARACTERS = 255
"""Longest name of an experiment."""

LABELS = 100
"""Most labels of an experiment."""

LABEL_CHARACTERS = 255
"""Longest label."""

ARCHIVE_BYTES = 96 * 1024**2
"""Most bytes of a model directory: of its files together, and of the archive that they make."""
