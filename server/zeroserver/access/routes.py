"""Access table: the callers that may use each route, and the least role of users.

An undeclared route requires the token of an administrator. A test fails for it, so that each new
route is declared deliberately. Extensions declare their own routes.
"""

from functools import cache
from typing import Literal, get_args

import msgspec

__all__ = [
    "ACCESS",
    "ADMIN",
    "ADMIN_TOKEN",
    "EXTENSIONS",
    "MEMBER",
    "OF_PROJECTS",
    "PUBLIC",
    "RANKS",
    "RUN",
    "SHARED",
    "VIEWER",
    "Access",
    "Caller",
    "Resource",
    "Role",
    "declare_access",
    "own",
    "resources_of",
    "shown",
]

Caller = Literal["user", "browser", "agent", "run", "search", "share", "nobody"]
"""Kind of caller; see :class:`zeroserver.access.principal.Principal`."""

Role = Literal["viewer", "member", "admin"]
"""Role of a user: a viewer reads, a member also submits and changes what they own, an administrator
changes everything."""

RANKS: dict[Role, int] = {role: rank for rank, role in enumerate(get_args(Role))}

Resource = Literal[
    "experiment", "trial", "checkpoint", "model", "project", "user", "share", "view", "comment"
]
"""Kind of resource with an owner; a user owns the account and its tokens."""

_USER = frozenset[Caller]({"user", "browser"})


class Access(msgspec.Struct, frozen=True):
    """Callers of a route.

    Args:
        callers: Permitted kinds of callers.
        role: Least role of users with a token or a browser session.
        owned: Kind of the resource in the path, if only its owner and administrators may use the
            route.
        shown: Kind of the resource in the path, which must belong to the experiments of a share
            link; only for callers with one.
        audited: Whether changes by users are in the audit log; reports of programs are not.
    """

    callers: frozenset[Caller]
    role: Role = "viewer"
    owned: Resource | None = None
    shown: Literal["experiment", "trial"] | None = None
    audited: bool = True

    @property
    def parameter(self) -> str:
        """Path parameter that names the owned or shown resource."""
        resource = self.owned or self.shown
        return _PARAMETERS[resource] if resource is not None else ""


_PARAMETERS: dict[Resource, str] = {
    "experiment": "experiment_id",
    "trial": "trial_id",
    "checkpoint": "uuid",
    "model": "name",
    "project": "project",
    "user": "user",
    "share": "share_id",
    "view": "view_id",
    "comment": "comment_id",
}

OF_PROJECTS = frozenset[Resource](
    {"experiment", "trial", "checkpoint", "model", "project", "comment"}
)
"""Kinds of resources that belong to a project, which may be restricted to its members."""

PUBLIC = Access(frozenset(get_args(Caller)))
"""Requires no token; the response must not contain data of experiments."""
VIEWER = Access(_USER)
MEMBER = Access(_USER, "member")
ADMIN = Access(_USER, "admin")
ADMIN_TOKEN = Access(frozenset({"user"}), "admin")
"""Requires the token of an administrator; browser sessions are refused."""
AGENT = Access(frozenset({"user", "agent"}), "admin")
RUN = Access(frozenset({"user", "run"}), "admin")
"""An administrator, or the run in the path."""
RUN_OR_AGENT = Access(RUN.callers | AGENT.callers, "admin")
SHARED = Access(_USER | {"share"})
"""Viewers and all share links; the response to a link must contain only what the link shows."""
SEARCH = Access(_USER | {"search"})
"""Users, or the searcher process of the experiment in the path."""


def own(
    resource: Resource, role: Role = "member", callers: frozenset[Caller] = frozenset()
) -> Access:
    """Return the access of a route that only the owner of its resource and administrators may use.

    Args:
        resource: Kind of the resource in the path.
        role: Least role of the owner.
        callers: Permitted callers besides users.

    Example:
        >>> from zeroserver.access.routes import own
        >>> own("experiment").parameter
        'experiment_id'
    """
    return Access(_USER | callers, role, resource)


def shown(
    resource: Literal["experiment", "trial"], callers: frozenset[Caller] = frozenset()
) -> Access:
    """Return the access of a route that viewers and share links of its experiment may use.

    Args:
        resource: Kind of the resource in the path.
        callers: Permitted callers besides users and share links.

    Example:
        >>> from zeroserver.access.routes import shown
        >>> shown("trial").parameter
        'trial_id'
    """
    return Access(SHARED.callers | callers, shown=resource)


EXTENSIONS = "/api/v1/extensions/"
"""Prefix of the routes of extensions."""

ACCESS: dict[str, Access] = {
    "GET /": PUBLIC,
    "GET /assets": PUBLIC,
    "GET /docs": PUBLIC,
    "GET /healthz": PUBLIC,
    "GET /login": PUBLIC,
    "GET /api/v1/openapi.json": VIEWER,
    "GET /api/v1/info": VIEWER,
    "GET /api/v1/events": VIEWER,
    "POST /api/v1/login-links": VIEWER,
    "POST /api/v1/logout": VIEWER,
    "POST /api/v1/token": ADMIN_TOKEN,
    "GET /api/v1/agent-token": ADMIN_TOKEN,
    "POST /api/v1/agent-token": ADMIN_TOKEN,
    # Agents
    "GET /api/v1/agents": VIEWER,
    "POST /api/v1/agents": AGENT,
    "GET /api/v1/agents/load-history": VIEWER,
    "GET /api/v1/agents/{agent_id}": VIEWER,
    "DELETE /api/v1/agents/{agent_id}": ADMIN,
    "POST /api/v1/agents/{agent_id}/disable": ADMIN,
    "POST /api/v1/agents/{agent_id}/enable": ADMIN,
    "GET /api/v1/agents/{agent_id}/work": AGENT,
    "POST /api/v1/agents/{agent_id}/work": AGENT,
    "POST /api/v1/agents/{agent_id}/leave": AGENT,
    # Runs
    "POST /api/v1/runs/{run_id}/started": AGENT,
    "POST /api/v1/runs/{run_id}/meeting": AGENT,
    "POST /api/v1/runs/{run_id}/exited": AGENT,
    "POST /api/v1/runs/{run_id}/logs": RUN_OR_AGENT,
    "POST /api/v1/runs/{run_id}/activity": RUN_OR_AGENT,
    "POST /api/v1/runs/{run_id}/reports": RUN_OR_AGENT,
    "POST /api/v1/runs/{run_id}/extend": RUN,
    "GET /api/v1/runs/{run_id}/directive": RUN,
    # Experiments
    "POST /api/v1/experiments": MEMBER,
    "GET /api/v1/experiments": VIEWER,
    "GET /api/v1/experiments/{experiment_id}": shown("experiment"),
    "PATCH /api/v1/experiments/{experiment_id}": own("experiment"),
    "DELETE /api/v1/experiments/{experiment_id}": own("experiment"),
    "POST /api/v1/experiments/{experiment_id}/fork": MEMBER,
    "POST /api/v1/experiments/{experiment_id}/{action}": own("experiment"),
    # The archive is not masked, and its experiment file may contain secrets.
    "GET /api/v1/experiments/{experiment_id}/archive": own(
        "experiment", "viewer", frozenset({"agent"})
    ),
    "GET /api/v1/experiments/{experiment_id}/trials": shown("experiment"),
    "GET /api/v1/experiments/{experiment_id}/logs": VIEWER,
    "GET /api/v1/experiments/{experiment_id}/events": shown("experiment"),
    "GET /api/v1/experiments/{experiment_id}/checkpoints": VIEWER,
    "GET /api/v1/experiments/{experiment_id}/best-checkpoint": VIEWER,
    # Trials
    "GET /api/v1/trials/{trial_id}": shown("trial"),
    "DELETE /api/v1/trials/{trial_id}": own("trial"),
    "POST /api/v1/trials/{trial_id}/continue": own("trial"),
    "POST /api/v1/trials/{trial_id}/fork": MEMBER,
    "POST /api/v1/trials/{trial_id}/{action}": own("trial"),
    "GET /api/v1/trials/{trial_id}/runs": VIEWER,
    "GET /api/v1/trials/{trial_id}/metric-names": shown("trial"),
    "GET /api/v1/trials/{trial_id}/metrics": shown("trial"),
    "GET /api/v1/trials/{trial_id}/logs": VIEWER,
    "GET /api/v1/trials/{trial_id}/checkpoints": VIEWER,
    "GET /api/v1/trials/{trial_id}/best-checkpoint": VIEWER,
    # Checkpoints
    "GET /api/v1/checkpoints/{uuid}": VIEWER,
    "GET /api/v1/checkpoints/{uuid}/file": VIEWER,
}
"""Method and path of each route to its callers."""


@cache
def resources_of(route: str) -> dict[Resource, str]:
    """Return the resources in the path of a route that belong to projects, with their parameters.

    Args:
        route: Method and path, such as ``GET /api/v1/trials/{trial_id}``.

    Example:
        >>> from zeroserver.access.routes import resources_of
        >>> resources_of("GET /api/v1/trials/{trial_id}/logs")
        {'trial': 'trial_id'}
    """
    return {
        kind: parameter
        for kind, parameter in _PARAMETERS.items()
        if kind in OF_PROJECTS
        and f"{{{parameter}}}" in route
        and (kind != "model" or "/models/{name}" in route)
    }


def declare_access(route: str, access: Access) -> None:
    """Declare the callers of an extension's route.

    Undeclared routes require the token of an administrator.

    Args:
        route: Method and path, such as ``GET /api/v1/extensions/hello``.
        access: ``VIEWER``, ``MEMBER``, ``ADMIN``, or ``own(RESOURCE)`` for a route about one
            resource.

    Raises:
        ValueError: If the route is not below ``/api/v1/extensions/``, is public, or has no
            parameter for its owned resource.

    Example:
        >>> from zeroserver.access.routes import VIEWER, declare_access
        >>> declare_access("GET /api/v1/extensions/hello", VIEWER)
    """
    if not route.partition(" ")[2].startswith(EXTENSIONS):
        raise ValueError(f"{route}: must be below {EXTENSIONS}")
    if access == PUBLIC:
        raise ValueError(f"{route}: must require a token, got PUBLIC")
    if access.owned is not None and f"{{{access.parameter}}}" not in route:
        raise ValueError(f"{route}: must contain {{{access.parameter}}}")
    ACCESS[route] = access
