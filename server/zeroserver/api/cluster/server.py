"""Server information, tokens, health and metrics."""

from typing import Annotated, Any

from fastapi import Query, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from sqlalchemy import Connection, func, select

from zerolab import __version__
from zerolab.errors import ForbiddenError
from zeroserver.access.principal import HttpsDep, PrincipalDep
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
from zeroserver.states import RunState
from zeroserver.store.schema import agents, experiments, runs, trials

__all__ = ["router"]

router = resource_router("", "server")


@router.get("/api/v1/info")
async def get_info(services: ServicesDep) -> Info:
    """Read the server's version, data directory, start and cluster."""

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
        )

    return await services.read(read)


@router.post("/api/v1/login-links", status_code=201)
def create_login_link(services: ServicesDep, principal: PrincipalDep) -> LoginLink:
    """Create a link that opens the page once, within five minutes.

    A browser session can make one if its own link was made with the token. Its logout revokes the
    link and the session that the link has opened.
    """
    if not principal.may_create_login_link():
        msg = (
            "this browser session was opened by a link of another session and cannot create links; "
            "use `zerolab open`"
        )
        raise ForbiddenError(msg)
    code = services.keys.login_code(principal.session)
    return LoginLink(url=f"/login?code={code}")


@router.post("/api/v1/logout", status_code=204)
def log_out(services: ServicesDep, principal: PrincipalDep, https: HttpsDep) -> Response:
    """Sign out: a browser ends its own session; with the token, every browser's ends.

    The sessions that were opened by links of a browser session end with it.
    """
    if principal.session:
        services.keys.end_session(principal.session)
    else:
        services.keys.end_all_sessions()
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
    """Replace the token of the installation: the old one is void at once.

    Every browser is signed out too. Runs, agents and searchers keep their own tokens.
    """
    token = services.keys.renew_token()
    services.wake_agents()
    return Token(token=token)


@router.get("/api/v1/agent-token")
def get_agent_token(services: ServicesDep) -> Token:
    """Read the join token of agents: it is valid for the routes of agents only."""
    return Token(token=services.keys.agent_token)


@router.post("/api/v1/agent-token", status_code=201)
def renew_agent_token(services: ServicesDep) -> Token:
    """Replace the join token of the agents: the old one is void at once."""
    token = services.keys.renew_agent_token()
    services.wake_agents()
    return Token(token=token)


@router.get("/healthz")
async def get_health(services: ServicesDep) -> Health:
    """Check that the database can be read and written and that its disk has room."""
    await services.probe()
    return Health(status="ok")


@router.get("/metrics", response_class=PlainTextResponse)
async def get_numbers(services: ServicesDep) -> PlainTextResponse:
    """Read metrics of the server in the format of Prometheus."""

    def read(connection: Connection) -> PlainTextResponse:
        lines: list[str] = []
        for name, table in (("experiments", experiments), ("trials", trials), ("runs", runs)):
            query = select(table.c.state, func.count().label("number")).group_by(table.c.state)
            counts = {row.state: row.number for row in connection.execute(query)}
            lines += [
                f"# HELP zerolab_{name} Number of {name} by state.",
                f"# TYPE zerolab_{name} gauge",
            ]
            lines += [
                f'zerolab_{name}{{state="{state}"}} {n}' for state, n in sorted(counts.items())
            ]
        living = connection.scalar(
            select(func.count()).select_from(agents).where(agents.c.alive == 1)
        )
        used_slots = connection.scalar(
            select(func.count()).select_from(runs).where(runs.c.state != RunState.EXITED)
        )
        for name, help_text, value in (
            ("agents", "Agents that are alive.", living),
            ("runs_holding_slots", "Runs that hold slots.", used_slots),
            ("start_time_seconds", "Start of the server since 1970.", services.started_at),
            ("write_groups_total", "Database transactions committed.", services.database.groups),
            ("write_jobs_total", "Changes committed.", services.database.jobs),
            ("write_jobs_waiting", "Changes that wait for the writer.", services.database.waiting),
            (
                "write_stalled_seconds",
                "Time without a change while some wait.",
                services.database.stalled_s,
            ),
            (
                "write_longest_job_cpu_seconds",
                "Most CPU that one change took.",
                services.database.longest_job_s,
            ),
        ):
            kind = "counter" if name.endswith("_total") else "gauge"
            full = f"zerolab_{name}"
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}", f"{full} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    return await services.read(read)


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
    """Open the page through a one-time link: sets the cookie and redirects to the page."""
    session = services.keys.redeem(code)
    if session is None:
        return HTMLResponse(_EXPIRED, status_code=403)
    answer = RedirectResponse("/", status_code=303)
    answer.set_cookie(
        services.keys.cookie,
        session,
        max_age=int(services.keys.session_s),
        secure=https,
        httponly=True,
        samesite="strict",
        path="/",
    )
    return answer
