"""Routes of the server: information, tokens, login and health."""

from typing import Annotated, Any

from fastapi import Query, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy import Connection

from zerolab import __version__
from zerolab.errors import ForbiddenError
from zeroserver.access.principal import HttpsDep, PrincipalDep
from zeroserver.access.tokens import TokenStore
from zeroserver.api.cluster.cluster_queries import pool_list
from zeroserver.api.resources import Cluster as ClusterInfo
from zeroserver.api.resources import (
    Health,
    Info,
    LoginLink,
    Token,
)
from zeroserver.api.rows import iso
from zeroserver.api.strict_route import resource_router
from zeroserver.services import ServicesDep

__all__ = ["router", "set_session"]

router = resource_router("", "server")


@router.get("/api/v1/info")
async def get_info(services: ServicesDep) -> Info:
    """Read the server's version, data directory, start time and cluster size."""

    def read(connection: Connection) -> Info:
        pools = pool_list(services.orchestrator, connection)
        agents_there, slots, free = (
            sum(getattr(pool, name) for pool in pools) for name in ("agents", "slots", "free_slots")
        )
        return Info(
            version=__version__,
            home=str(services.orchestrator.home.path),
            database="sqlite" if services.database.sqlite else "postgresql",
            started_at=iso(services.started_at) or "",
            cluster=ClusterInfo(agents=agents_there, slots=slots, free_slots=free),
            projects=len(services.orchestrator.projects.projects()),
        )

    return await services.read(read)


@router.post("/api/v1/login-links", status_code=201)
def create_login_link(services: ServicesDep, principal: PrincipalDep) -> LoginLink:
    """Create a link that opens the page once, within five minutes.

    A browser session can create one only if its own link was created with the token. Its logout
    revokes the link and the session opened with it.
    """
    if not principal.may_create_login_link():
        msg = (
            "this browser session was opened by a link of another session and cannot create links; "
            "use `zerolab open`"
        )
        raise ForbiddenError(msg)
    code = services.keys.login_code(principal)
    return LoginLink(url=f"/login?code={code}")


@router.post("/api/v1/logout", status_code=204)
def log_out(services: ServicesDep, principal: PrincipalDep, https: HttpsDep) -> Response:
    """Log out: end a browser's session, or with a token all browser sessions of its user.

    Sessions opened with links of a browser session end with it.
    """
    if principal.session:
        services.keys.end_session(principal.session)
    else:
        services.keys.end_sessions_of(principal.user_id)
    response = Response(status_code=204)
    response.delete_cookie(
        services.keys.cookie,
        secure=https,
        httponly=True,
        samesite="strict",
        path="/",
    )
    return response


@router.post("/api/v1/token", status_code=201)
def renew_token(services: ServicesDep) -> Token:
    """Replace the token of the installation; the old one becomes invalid at once.

    All browsers are logged out. Runs, agents and searchers keep their tokens.
    """
    token = services.keys.renew_token()
    services.wake_agents()
    return Token(token=token)


@router.get("/api/v1/agent-token")
def get_agent_token(services: ServicesDep) -> Token:
    """Read the join token of agents, which is valid only for the routes of agents."""
    return Token(token=services.keys.agent_token)


@router.post("/api/v1/agent-token", status_code=201)
def renew_agent_token(services: ServicesDep) -> Token:
    """Replace the join token of agents; the old one becomes invalid at once."""
    token = services.keys.renew_agent_token()
    services.wake_agents()
    return Token(token=token)


@router.get("/healthz")
async def get_health(services: ServicesDep) -> Health:
    """Check that the database is readable and writable and its disk is not full."""
    await services.health.check()
    return Health(status="ok")


_EXPIRED = (
    "<!doctype html><title>Zerolab</title><p>This link has been used or is too old. "
    "Ask for a new one: <code>zerolab open</code>."
)

_LOGIN: dict[int | str, dict[str, Any]] = {
    303: {"description": "Logged in; the page is at `/`."},
    403: {"content": {"text/html": {}}, "description": "The link has been used.", "x-own": True},
}


@router.get("/login", response_class=HTMLResponse, responses=_LOGIN)
def log_in(
    services: ServicesDep, https: HttpsDep, code: Annotated[str, Query(max_length=200)]
) -> Response:
    """Log in with a one-time link: set the cookie and redirect to the page."""
    session = services.keys.redeem(code)
    if session is None:
        return HTMLResponse(_EXPIRED, status_code=403)
    response = RedirectResponse("/", status_code=303)
    set_session(response, services.keys, session, https=https)
    return response


def set_session(response: Response, keys: TokenStore, session: str, *, https: bool) -> None:
    """Add the cookie of a session to a response."""
    response.set_cookie(
        keys.cookie,
        session,
        max_age=int(keys.session_s),
        secure=https,
        httponly=True,
        samesite="strict",
        path="/",
    )
