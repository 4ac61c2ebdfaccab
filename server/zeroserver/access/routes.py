"""Access table: the callers that may use each route of the server.

An undeclared route requires the owner's token. A test fails for it, so that each new route is
declared deliberately. Extensions declare their own routes.
"""

from typing import Literal

__all__ = [
    "ACCESS",
    "EXTENSIONS",
    "PUBLIC",
    "RUN",
    "TOKEN",
    "USER",
    "Caller",
    "Callers",
    "declare_access",
]

Caller = Literal["owner", "browser", "agent", "run", "search", "nobody"]
"""Kind of caller; see :class:`zeroserver.access.principal.Principal`."""

Callers = frozenset[Caller]

PUBLIC: Callers = frozenset({"owner", "browser", "agent", "run", "search", "nobody"})
"""Requires no token; the response must not contain data of experiments."""
TOKEN: Callers = frozenset({"owner"})
"""Requires the owner's token; browser sessions are refused."""
USER: Callers = frozenset({"owner", "browser"})
AGENT: Callers = frozenset({"owner", "agent"})
USER_OR_AGENT: Callers = USER | AGENT
RUN: Callers = frozenset({"owner", "run"})
"""The owner, or the run in the path."""
RUN_OR_AGENT: Callers = RUN | AGENT
SEARCH: Callers = frozenset({"owner", "browser", "search"})
"""Users, or the searcher process of the experiment in the path."""

EXTENSIONS = "/api/v1/extensions/"
"""Prefix of the routes of extensions."""

ACCESS: dict[str, Callers] = {
    "GET /": PUBLIC,
    "GET /assets": PUBLIC,
    "GET /docs": PUBLIC,
    "GET /healthz": PUBLIC,
    "GET /login": PUBLIC,
    "GET /api/v1/openapi.json": USER,
    "GET /api/v1/info": USER,
    "GET /api/v1/events": USER,
    "POST /api/v1/login-links": USER,
    "POST /api/v1/logout": USER,
    "POST /api/v1/token": TOKEN,
    "GET /api/v1/agent-token": TOKEN,
    "POST /api/v1/agent-token": TOKEN,
    # Agents
    "GET /api/v1/agents": USER,
    "POST /api/v1/agents": AGENT,
    "GET /api/v1/agents/{agent_id}": USER,
    "DELETE /api/v1/agents/{agent_id}": USER,
    "POST /api/v1/agents/{agent_id}/disable": USER,
    "POST /api/v1/agents/{agent_id}/enable": USER,
    "GET /api/v1/agents/{agent_id}/work": AGENT,
    "POST /api/v1/agents/{agent_id}/leave": AGENT,
    # Runs
    "POST /api/v1/runs/{run_id}/started": AGENT,
    "POST /api/v1/runs/{run_id}/meeting": AGENT,
    "POST /api/v1/runs/{run_id}/exited": AGENT,
    "POST /api/v1/runs/{run_id}/logs": AGENT,
    "POST /api/v1/runs/{run_id}/activity": RUN_OR_AGENT,
    "POST /api/v1/runs/{run_id}/reports": RUN_OR_AGENT,
    "POST /api/v1/runs/{run_id}/extend": RUN,
    "GET /api/v1/runs/{run_id}/directive": RUN,
    # Experiments
    "POST /api/v1/experiments": USER,
    "GET /api/v1/experiments": USER,
    "GET /api/v1/experiments/{experiment_id}": USER,
    "PATCH /api/v1/experiments/{experiment_id}": USER,
    "DELETE /api/v1/experiments/{experiment_id}": USER,
    "POST /api/v1/experiments/{experiment_id}/fork": USER,
    "POST /api/v1/experiments/{experiment_id}/{action}": USER,
    "GET /api/v1/experiments/{experiment_id}/archive": USER_OR_AGENT,
    "GET /api/v1/experiments/{experiment_id}/trials": USER,
    "GET /api/v1/experiments/{experiment_id}/logs": USER,
    "GET /api/v1/experiments/{experiment_id}/events": USER,
    "GET /api/v1/experiments/{experiment_id}/checkpoints": USER,
    "GET /api/v1/experiments/{experiment_id}/best-checkpoint": USER,
    # Trials
    "GET /api/v1/trials/{trial_id}": USER,
    "DELETE /api/v1/trials/{trial_id}": USER,
    "POST /api/v1/trials/{trial_id}/continue": USER,
    "POST /api/v1/trials/{trial_id}/fork": USER,
    "POST /api/v1/trials/{trial_id}/{action}": USER,
    "GET /api/v1/trials/{trial_id}/runs": USER,
    "GET /api/v1/trials/{trial_id}/metric-names": USER,
    "GET /api/v1/trials/{trial_id}/metrics": USER,
    "GET /api/v1/trials/{trial_id}/logs": USER,
    "GET /api/v1/trials/{trial_id}/checkpoints": USER,
    "GET /api/v1/trials/{trial_id}/best-checkpoint": USER,
    # Checkpoints
    "GET /api/v1/checkpoints/{uuid}": USER,
    "GET /api/v1/checkpoints/{uuid}/file": USER,
}
"""Method and path of each route to its callers."""


def declare_access(route: str, callers: Callers) -> None:
    """Declare the callers of an extension's route.

    Undeclared routes require the owner's token.

    Args:
        route: Method and path, such as ``GET /api/v1/extensions/hello``.
        callers: One of the sets of this module except ``PUBLIC``.

    Raises:
        ValueError: If the route is not below ``/api/v1/extensions/``, or is public.

    Example:
        >>> from zeroserver.access.routes import USER, declare_access
        >>> declare_access("GET /api/v1/extensions/hello", USER)
    """
    if not route.partition(" ")[2].startswith(EXTENSIONS):
        raise ValueError(f"{route}: must be below {EXTENSIONS}")
    if callers == PUBLIC:
        raise ValueError(f"{route}: must require a token, got PUBLIC")
    ACCESS[route] = callers
