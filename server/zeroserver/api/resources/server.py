"""Resources of the server: version, health, tokens."""

from typing import Literal

from zeroserver.api.rows import Resource, Time

__all__ = ["Cluster", "Health", "Info", "LoginLink", "Token"]


class Cluster(Resource, frozen=True):
    """What there is to run on."""

    agents: int
    slots: int
    free_slots: int


class Info(Resource, frozen=True):
    """Version and capabilities of the server."""

    version: str
    home: str
    database: Literal["sqlite", "postgresql"]
    started_at: Time
    cluster: Cluster


class LoginLink(Resource, frozen=True):
    """A link that opens the page once."""

    url: str


class Token(Resource, frozen=True):
    """A token: the owner's, or the join token of agents."""

    token: str


class Health(Resource, frozen=True):
    """The server is up and its database answers."""

    status: Literal["ok"]
