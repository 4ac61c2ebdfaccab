"""Who asks, as one value: made once by the guard, handed to routes, asked by verbs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from zeroserver.access.routes import Caller, Callers
from zeroserver.errors import UnauthorizedError

__all__ = ["NOBODY", "OWNER", "HttpsDep", "Principal", "PrincipalDep", "principal_of"]


@dataclass(frozen=True)
class Principal:
    """One caller of the server.

    Args:
        kind: ``owner`` shows the token of the installation, ``browser`` came through a one-time
            link, ``agent`` shows the join token of agents, ``run`` and ``search`` the token made
            for one run or for the searcher process of one experiment, ``nobody`` shows nothing.
        run_id: Of a run; 0 for the others.
        session: Id of a browser's session; empty for the others.
        parent: Id of the browser session that created the link of this one; empty when the owner's
            token did.
        experiment_id: Of a searcher process; 0 for the others.
    """

    kind: Caller
    run_id: int = 0
    session: str = ""
    parent: str = ""
    experiment_id: int = 0

    def may_call(self, callers: Callers, parameters: Mapping[str, str]) -> bool:
        """Check whether it may use a route.

        Args:
            callers: Of the route, from :data:`zeroserver.access.routes.ACCESS`.
            parameters: Of the path; the tokens of runs and searchers are for one id alone.
        """
        if self.kind not in callers:
            return False
        if self.kind == "run":
            return parameters.get("run_id") == str(self.run_id)
        if self.kind == "search":
            return parameters.get("experiment_id") == str(self.experiment_id)
        return True

    def may_create_login_link(self) -> bool:
        """Check whether it may sign further browsers in."""
        return self.kind == "owner" or (self.kind == "browser" and not self.parent)

    def must_show_origin(self) -> bool:
        """Whether what it changes counts only if it says from which page it comes.

        A browser sends its cookie along with the requests of any page.
        """
        return self.kind == "browser"

    def __str__(self) -> str:
        names = {"run": f"run {self.run_id}", "search": f"the searcher of {self.experiment_id}"}
        return names.get(self.kind, self.kind)


NOBODY = Principal("nobody")
OWNER = Principal("owner")


def principal_of(request: Request) -> Principal:
    """Return who sent a request.

    Raises:
        UnauthorizedError: If no guard stands before the route.
    """
    found = request.scope.get("state", {}).get("principal")
    if not isinstance(found, Principal):
        msg = "the guard has not seen this request"
        raise UnauthorizedError(msg)
    return found


async def _ask(request: Request) -> Principal:
    return principal_of(request)


async def _is_https(request: Request) -> bool:
    return request.url.scheme == "https"


HttpsDep = Annotated[bool, Depends(_is_https)]
"""Parameter of a route: the client uses HTTPS, to the server or to a proxy before it."""

PrincipalDep = Annotated[Principal, Depends(_ask)]
"""Parameter of a route: who asks."""
