"""Sizes of what describes an experiment, the same in its file and in every request."""

__all__ = ["LABELS", "LABEL_CHARACTERS", "NAME_CHARACTERS"]

NAME_CHARACTERS = 255
"""Longest name of an experiment."""

LABELS = 100
"""Most labels of an experiment."""

LABEL_CHARACTERS = 255
"""Longest label."""
