"""Media of trials in responses."""

from typing import Any, Literal

from zeroserver.api.rows import Resource, Time

__all__ = ["Media", "MediaName", "MediaNamePage", "MediaPage", "RemovedMedia"]

MediaKind = Literal["image", "table", "text", "histogram", "audio", "file"]


class Media(Resource, frozen=True):
    """Medium of a trial at a step."""

    name: str
    """Name, the same at each step."""
    step: int
    """Number of batches that the trial had trained."""
    position: int
    """Index among the media of the same name and step."""
    type: MediaKind
    """Kind of the medium."""
    digest: str
    """SHA-256 of the content, for the download; empty if `metadata` is the content."""
    size: int
    """Size of the content in bytes."""
    file_name: str
    """Name of the downloaded file."""
    metadata: dict[str, Any]
    """Caption, width and height, sample rate, or bins of a histogram."""
    time: Time | None
    """Time of the report."""


class MediaPage(Resource, frozen=True):
    """Response with a page of media, sorted by name, step and position."""

    media: list[Media]
    next_after: str | None


class MediaName(Resource, frozen=True):
    """Name of media of a trial, with its totals."""

    name: str
    """Name of the media."""
    type: MediaKind
    """Kind of the media."""
    count: int
    """Number of media."""
    first_step: int
    """First step."""
    last_step: int
    """Last step."""
    size: int
    """Size of all of them in bytes."""


class MediaNamePage(Resource, frozen=True):
    """Response with the names of a trial's media, sorted."""

    names: list[MediaName]
    next_after: None = None


class RemovedMedia(Resource, frozen=True):
    """Response to a deletion of media."""

    count: int
    """Number of deleted media."""
    size: int
    """Size of their content in bytes."""
