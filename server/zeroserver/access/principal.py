"""Caller of a request, identified by the guard and passed to the routes."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from fastapi import Depends, Request

from zeroserver.access.routes import RANKS, Access, Caller, Role
from zeroserver.errors import UnauthorizedError
from zeroserver.store.user_directory import ADMIN

__all__ = ["NOBODY", "OWNER", "HttpsDep", "Principal", "PrincipalDep", "principal_of"]


class Principal(msgspec.Struct, frozen=True):
    """Caller of the server.

    Args:
        kind: ``user`` has an API token or the token of the installation, ``browser`` logged in with
            a one-time link, ``agent`` has the join token of agents, ``run`` and ``search`` have the
            token of one run or of the searcher process of one experiment, ``share`` has a share
            link, ``nobody`` has none.
        run_id: Id of the run; 0 for other kinds.
        session: Id of a browser's session; empty for other kinds.
        parent: Id of the browser session that created the link of this session; empty if the link
            was created with a token.
        experiment_id: Experiment of the searcher process; 0 for other kinds.
        user_id: Id of the user, with a token or in a browser; 0 for other kinds.
        user: Name of the user; empty for other kinds.
        role: Role of the user; None for other kinds.
        token_id: API token of the user or of the browser's link; 0 for the token of the
            installation.
        share_id: Share link; 0 for other kinds.
        sharer_id: User who created the share link; 0 for other kinds.
        experiment_ids: Experiments that the share link shows; empty for other kinds.
    """

    kind: Caller
    run_id: int = 0
    session: str = ""
    parent: str = ""
    experiment_id: int = 0
    user_id: int = 0
    user: str = ""
    role: Role | None = None
    token_id: int = 0
    share_id: int = 0
    sharer_id: int = 0
    experiment_ids: frozenset[int] = frozenset()

    @property
    def is_admin(self) -> bool:
        """Whether the caller is an administrator."""
        return self.role == "admin"

    def may_call(self, access: Access, parameters: Mapping[str, str]) -> bool:
        """Check whether the caller may use a route, except for the owner of its resource.

        Args:
            access: Permitted callers, from :data:`zeroserver.access.routes.ACCESS`.
            parameters: Path parameters; tokens of runs and searchers are valid only for their own
                id.
        """
        if self.kind not in access.callers:
            return False
        if self.kind == "run":
            return parameters.get("run_id") == str(self.run_id)
        if self.kind == "search":
            return parameters.get("experiment_id") == str(self.experiment_id)
        return self.role is None or self.has_role(access.role)

    def has_role(self, role: Role) -> bool:
        """Check whether the caller is a user with at least this role."""
        return self.role is not None and RANKS[self.role] >= RANKS[role]

    def may_create_login_link(self) -> bool:
        """Check whether the caller may create login links."""
        return self.kind == "user" or (self.kind == "browser" and not self.parent)

    def must_show_origin(self) -> bool:
        """Check whether requests that change state need an ``Origin`` header.

        Browsers send the cookie with requests from any page, so it does not protect against CSRF.
        """
        return self.kind in {"browser", "share"}

    def __str__(self) -> str:
        names = {
            "run": f"run {self.run_id}",
            "search": f"the searcher of {self.experiment_id}",
            "user": f"user {self.user}",
            "share": f"share link {self.share_id}",
        }
        return names.get(self.kind, self.kind)


NOBODY = Principal("nobody")
OWNER = Principal("user", user_id=ADMIN.id, user=ADMIN.name, role=ADMIN.role)
"""Caller with the token of the installation."""


def principal_of(request: Request) -> Principal:
    """Return the caller of a request.

    Raises:
        UnauthorizedError: If the guard did not check the request.
    """
    principal = request.scope.get("state", {}).get("principal")
    if not isinstance(principal, Principal):
        msg = "the guard has not checked this request"
        raise UnauthorizedError(msg)
    return principal


async def _principal(request: Request) -> Principal:
    return principal_of(request)


async def _is_https(request: Request) -> bool:
    return request.url.scheme == "https"


HttpsDep = Annotated[bool, Depends(_is_https)]
"""Dependency: whether the client uses HTTPS, to the server or to a proxy in front of it."""

PrincipalDep = Annotated[Principal, Depends(_principal)]
"""Dependency: the caller of the request."""
