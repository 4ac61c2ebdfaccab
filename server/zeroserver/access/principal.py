"""Caller of a request, identified by the guard and passed to the routes."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from fastapi import Depends, Request

from zeroserver.access.routes import Caller, Callers
from zeroserver.errors import UnauthorizedError

__all__ = ["NOBODY", "OWNER", "HttpsDep", "Principal", "PrincipalDep", "principal_of"]


class Principal(msgspec.Struct, frozen=True):
    """Caller of the server.

    Args:
        kind: ``owner`` has the token of the installation, ``browser`` logged in with a one-time
            link, ``agent`` has the join token of agents, ``run`` and ``search`` have the token of
            one run or of the searcher process of one experiment, ``nobody`` has none.
        run_id: Id of the run; 0 for other kinds.
        session: Id of a browser's session; empty for other kinds.
        parent: Id of the browser session that created the link of this session; empty if the link
            was created with the owner's token.
        experiment_id: Experiment of the searcher process; 0 for other kinds.
    """

    kind: Caller
    run_id: int = 0
    session: str = ""
    parent: str = ""
    experiment_id: int = 0

    def may_call(self, callers: Callers, parameters: Mapping[str, str]) -> bool:
        """Check whether the caller may use a route.

        Args:
            callers: Permitted callers, from :data:`zeroserver.access.routes.ACCESS`.
            parameters: Path parameters; tokens of runs and searchers are valid only for their own
                id.
        """
        if self.kind not in callers:
            return False
        if self.kind == "run":
            return parameters.get("run_id") == str(self.run_id)
        if self.kind == "search":
            return parameters.get("experiment_id") == str(self.experiment_id)
        return True

    def may_create_login_link(self) -> bool:
        """Check whether the caller may create login links."""
        return self.kind == "owner" or (self.kind == "browser" and not self.parent)

    def must_show_origin(self) -> bool:
        """Check whether requests that change state need an ``Origin`` header.

        Browsers send the cookie with requests from any page, so it does not protect against CSRF.
        """
        return self.kind == "browser"

    def __str__(self) -> str:
        names = {"run": f"run {self.run_id}", "search": f"the searcher of {self.experiment_id}"}
        return names.get(self.kind, self.kind)


NOBODY = Principal("nobody")
OWNER = Principal("owner")


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
