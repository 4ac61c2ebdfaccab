"""Comments."""

from zeroserver.api.rows import Resource, Time

__all__ = ["Comment", "CommentAnswer", "CommentPage"]


class Comment(Resource, frozen=True):
    """Comment on an experiment."""

    id: int
    """Id, from 1."""
    experiment_id: int
    """Its experiment."""
    author: str
    """User who wrote it."""
    text: str
    """Plain text."""
    created_at: Time
    """Time of creation."""
    edited_at: Time | None
    """Time of the last change by its author."""


class CommentAnswer(Resource, frozen=True):
    """Response with one comment."""

    comment: Comment


class CommentPage(Resource, frozen=True):
    """Page of comments, oldest first."""

    comments: list[Comment]
    next_after: str | None
