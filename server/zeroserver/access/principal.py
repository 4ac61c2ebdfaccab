"""Caller of a request: identified by the guard, passed to the routes."""

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
        kind: ``owner`` has the token of the installation, ``browser`` signed in by a one-time
            link, ``agent`` has the join token of agents, ``run`` and ``search`` the token created
            for one run or for the searcher process of one experiment, ``nobody`` has none.
        run_id: Id of the run; 0 for other kinds.
        session: Id of a browser's session; empty for other kinds.
        parent: Id of the browser session that created the link of this one; empty when the owner's
            token did.
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
            parameters: Path parameters; the tokens of runs and searchers are valid for one id only.
        """
        if self.kind not in callers:
            return False
        if self.kind == "run":
            return parameters.get("run_id") == str(self.run_id)
        if self.kind == "search":
            return parameters.get("experiment_id") == str(self.experiment_id)
        return True

    def may_create_login_link(self) -> bool:
        """Check whether the caller may sign in more browsers."""
        return self.kind == "owner" or (self.kind == "browser" and not self.parent)

    def must_show_origin(self) -> bool:
        """Check whether requests that change something need an ``Origin`` header.

        A browser sends its cookie with requests of any page, so a cookie proves no intent (CSRF).
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
"""Dependency: whether the client uses HTTPS, to the server or to a proxy before it."""

PrincipalDep = Annotated[Principal, Depends(_principal)]
"""Dependency: the caller of the request."""
