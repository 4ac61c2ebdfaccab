"""Resources of the server: version, health, tokens."""

from typing import Literal

from zeroserver.api.rows import Resource, Time

__all__ = ["Cluster", "Health", "Info", "LoginLink", "Token"]


class Cluster(Resource, frozen=True):
    """Size of the cluster."""

    agents: int
    slots: int
    free_slots: int


class Info(Resource, frozen=True):
    """Version, database and cluster of the server."""

    version: str
    home: str
    database: Literal["sqlite", "postgresql"]
    started_at: Time
    cluster: Cluster
    projects: int
    """Number of projects that the caller sees."""


class LoginLink(Resource, frozen=True):
    """Link that opens the page once."""

    url: str


class Token(Resource, frozen=True):
    """Token: the owner's, or the join token of agents."""

    token: str


class Health(Resource, frozen=True):
    """Response of a healthy server with a working database."""

    status: Literal["ok"]
