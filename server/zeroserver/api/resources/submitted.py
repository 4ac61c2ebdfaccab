"""Submitted files, configuration and the effective engine configuration."""

from typing import Any

from zeroserver.api.rows import Resource

__all__ = ["EngineAnswer", "EngineEntry", "ModelFile", "ModelFilePage", "SubmittedAnswer"]


class ModelFile(Resource, frozen=True):
    """A file of a model directory."""

    path: str
    """Inside the directory."""
    size_bytes: int
    """Of it."""


class ModelFilePage(Resource, frozen=True):
    """All files of a model directory, by their paths."""

    files: list[ModelFile]
    next_after: None


class SubmittedAnswer(Resource, frozen=True):
    """The configuration of an experiment as it was submitted."""

    config: dict[str, Any]


class EngineEntry(Resource, frozen=True):
    """A value of the engine's configuration."""

    key: str
    """Dotted."""
    value: Any
    """What the engine uses."""
    origin: str
    """`file`, `override`, `auto`, `default`, `derived` or `hint`; after a colon a remark."""


class EngineAnswer(Resource, frozen=True):
    """The engine's configuration of a trial."""

    file: str | None
    """The engine file in the model directory; null where the experiment holds its content."""
    entries: list[EngineEntry]
    """Every key that has an effect."""
    changes: list[str]
    """What was written otherwise before the file was read."""
    problems: list[str]
    """Why there are no entries."""
