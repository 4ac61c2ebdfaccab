"""Users, their tokens, and the caller."""

from typing import Literal

from zeroserver.access.routes import Role
from zeroserver.api.rows import Resource, Time

__all__ = [
    "ApiToken",
    "ApiTokenPage",
    "AuditEntry",
    "AuditPage",
    "NewApiToken",
    "User",
    "UserAnswer",
    "UserPage",
    "Whoami",
]


class User(Resource, frozen=True):
    """User of the installation."""

    name: str
    """Name; it cannot be changed."""
    role: Role
    """`viewer` reads, `member` also submits and changes what they own, `admin` changes
    everything."""
    active: bool
    """Whether tokens and browser sessions of the user are valid."""
    weight: float
    """Share of the slots of a pool with the policy `fair_share`, relative to other users."""
    created_at: Time
    """Time of creation."""


class UserAnswer(Resource, frozen=True):
    """Response with one user."""

    user: User


class UserPage(Resource, frozen=True):
    """All users, sorted by name."""

    users: list[User]
    next_after: None = None


class ApiToken(Resource, frozen=True):
    """Token of a user, without its secret."""

    id: int
    """Id, from 1."""
    name: str
    """Purpose of the token."""
    created_at: Time
    """Time of creation."""
    expires_at: Time | None
    """End of its validity; null: it has none."""
    last_used_at: Time | None
    """Time of its last use; null: it was never used."""


class ApiTokenPage(Resource, frozen=True):
    """Tokens of a user, oldest first."""

    tokens: list[ApiToken]
    next_after: None = None


class NewApiToken(Resource, frozen=True):
    """Response with a new token."""

    secret: str
    """The token itself; no other response shows it."""
    token: ApiToken


class AuditEntry(Resource, frozen=True):
    """Change that a user made."""

    id: int
    """Id, from 1."""
    time: Time
    """Time of the change."""
    user: str
    """Name of the user."""
    token_id: int
    """API token of the request, or of the link of the browser; 0 for the token of the
    installation and for a sign-in with a password."""
    action: str
    """Method and path of the request, such as `POST /experiments/3/kill`."""


class AuditPage(Resource, frozen=True):
    """Page of changes, newest first."""

    changes: list[AuditEntry]
    next_after: str | None


class Whoami(Resource, frozen=True):
    """The caller."""

    user: str
    """Name of the user; empty for a share link."""
    role: Role
    """Role of the user."""
    kind: Literal["token", "browser", "share"]
    """Whether the request has a token, comes from a browser or has a share link."""
    expires_at: Time | None
    """End of the validity of the API token or share link that is used; null: it has none."""
    shared: bool
    """Whether the installation has several users."""
