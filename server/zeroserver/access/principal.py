"""Who asks, as one value: made once by the guard, handed to routes, asked by verbs."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Request

from zeroserver.errors import UnauthorizedError

__all__ = ["NOBODY", "OWNER", "Principal", "PrincipalDep", "principal_of"]


@dataclass(frozen=True)
class Principal:
    """One caller of the server.

    Args:
        kind: ``owner`` shows the token of the installation, ``browser`` came through a one-time
            link, ``run`` shows the token made for that run alone, ``nobody`` shows nothing.
        run_id: Of a run; 0 for the others.
        session: Id of a browser's session; empty for the others.
    """

    kind: Literal["owner", "browser", "run", "nobody"]
    run_id: int = 0
    session: str = ""

    def may_manage(self) -> bool:
        """Whether it may read and change everything, as the owner does."""
        return self.kind in {"owner", "browser"}

    def may_report(self, run_id: int) -> bool:
        """Whether it may speak for a run."""
        return self.may_manage() or (self.kind == "run" and self.run_id == run_id)

    def may_renew_token(self) -> bool:
        """Whether it may put a new token in place of the installation's, and see it."""
        return self.kind == "owner"

    def must_show_origin(self) -> bool:
        """Whether what it changes counts only if it says from which page it comes.

        A browser sends its cookie along with the requests of any page.
        """
        return self.kind == "browser"

    def __str__(self) -> str:
        return f"run {self.run_id}" if self.kind == "run" else self.kind


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


PrincipalDep = Annotated[Principal, Depends(_ask)]
"""Parameter of a route: who asks."""
