"""Share links and their content."""

from zeroserver.api.resources import Experiment
from zeroserver.api.rows import Resource, Time

__all__ = ["NewShareAnswer", "OpenedShare", "Share", "SharePage", "SharedExperiments"]


class Share(Resource, frozen=True):
    """Share link, without its token."""

    id: int
    """Id, from 1."""
    name: str
    """Purpose of the link."""
    owner: str
    """User who created it."""
    experiments: list[int]
    """Experiments that it shows."""
    path: str
    """Page that it opens: the part of its address after `#`."""
    created_at: Time
    """Time of creation."""
    expires_at: Time
    """End of its validity."""
    valid: bool
    """Whether it has not expired and its owner is active."""


class SharePage(Resource, frozen=True):
    """Share links, newest first."""

    shares: list[Share]
    next_after: None = None


class NewShareAnswer(Resource, frozen=True):
    """Response to the creation of a share link."""

    url: str
    """Path of the link, with its token; shown only once."""
    share: Share


class OpenedShare(Resource, frozen=True):
    """Response to the opening of a share link."""

    path: str
    """Page that it opens, as `path` of the link."""


class SharedExperiments(Resource, frozen=True):
    """Content of a share link."""

    name: str
    """Purpose of the link."""
    path: str
    """Page that it opens, as `path` of the link."""
    expires_at: Time
    """End of its validity."""
    experiments: list[Experiment]
    """Its experiments that were not deleted since, newest first."""
