"""Saved views."""

from zeroserver.api.rows import Resource, Time

__all__ = ["View", "ViewAnswer", "ViewPage"]


class View(Resource, frozen=True):
    """Saved view of the page."""

    id: int
    """Id, from 1."""
    name: str
    """Name, unique among the views of its owner."""
    owner: str
    """User who saved it."""
    path: str
    """Part of a page address after `#`: the list or comparison, with its filters, columns,
    order and chart settings."""
    shared: bool
    """Whether all users see it."""
    created_at: Time
    """Time of creation."""
    updated_at: Time
    """Time of the last change."""


class ViewAnswer(Resource, frozen=True):
    """Response with one view."""

    view: View


class ViewPage(Resource, frozen=True):
    """Views of the user and shared views of others, sorted by name."""

    views: list[View]
    next_after: None = None
