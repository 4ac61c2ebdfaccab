"""Routes of interactive tasks: their tunnels, state, links, and the proxy to their ports."""

import time
from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from zerolab.contract.names import HOST_KEY, PORT_LABEL, USER_NAME
from zerolab.errors import ConfigError, ConflictError, ForbiddenError, NotFoundError
from zeroserver.access.principal import PrincipalDep
from zeroserver.access.routes import ACCESS, RUN, VIEWER, Access, own
from zeroserver.access.task_hosts import ENTRY, PROXY, TASK
from zeroserver.access.tokens import is_number
from zeroserver.access.upgrades import upgrade_of
from zeroserver.api.common import IdPath
from zeroserver.api.rows import Resource
from zeroserver.api.strict_route import resource_router
from zeroserver.errors import BusyError
from zeroserver.extensions.interactive.endpoints import Endpoint, Endpoints, TaskKind
from zeroserver.extensions.interactive.forwarding import (
    forward_request,
    tunnel_response,
    waiting_page,
)
from zeroserver.services import Services, ServicesDep
from zeroserver.states import EXPERIMENT_ENDED
from zeroserver.store.rows import ExperimentRow, RunRow, find_row

__all__ = ["router"]

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_METHODS = ("DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT")
_PATH = PROXY + "{experiment_id}/{path:path}"
_OWNER = own("experiment")

ACCESS.update({f"{method} {_PATH}": Access(_OWNER.callers, _OWNER.role, _OWNER.owned, audited=False)
               for method in _METHODS})  # fmt: skip
ACCESS.update(
    {
        "GET /api/v1/interactive-tasks": VIEWER,
        "POST /api/v1/interactive-tasks/{experiment_id}/link": _OWNER,
        "POST /api/v1/runs/{run_id}/port": RUN,
        "GET /api/v1/runs/{run_id}/tunnel": RUN,
    }
)

router = resource_router("/api/v1", "interactive tasks")


class PortReport(BaseModel):
    """Report of a task whose port can be used."""

    model_config = ConfigDict(extra="forbid")

    kind: TaskKind
    idle_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Idle time in seconds after which the task ends; null for no limit."""
    busy: bool = False
    """Whether it is computing, so that it is not idle."""
    user: Annotated[str, Field(max_length=100, pattern=USER_NAME)] = ""
    """User name on the machine, for ssh."""
    host_key: Annotated[str, Field(max_length=1000, pattern=HOST_KEY)] = ""
    """Public key of its sshd."""


class IdleTime(Resource, frozen=True):
    """Time since the last use of a task."""

    idle_s: float
    """Seconds."""


class InteractiveTask(Resource, frozen=True):
    """Running task whose port can be used."""

    experiment_id: int
    kind: TaskKind
    path: str
    """Path of its page on this server."""
    ready: bool
    """Whether it accepts connections now."""
    idle_s: float
    """Seconds since its last use."""
    idle_timeout_s: float | None
    """Idle time in seconds after which it ends; null for no limit."""
    user: str
    """User name on the machine, for ssh."""
    host_key: str
    """Public key of its sshd; empty for other kinds."""


class InteractiveTasks(Resource, frozen=True):
    """Running tasks with a port."""

    tasks: list[InteractiveTask]


class TaskLink(Resource, frozen=True):
    """Link to a task."""

    url: str
    """One-time URL that opens the task without signing in; valid for one minute."""


@router.get("/interactive-tasks")
async def list_interactive_tasks(
    services: ServicesDep, principal: PrincipalDep
) -> InteractiveTasks:
    """List the running notebooks, shells, TensorBoards and ports that the caller may use."""
    return InteractiveTasks(
        tasks=[
            InteractiveTask(
                experiment_id=item.experiment_id,
                kind=item.kind,
                path=f"{PROXY}{item.experiment_id}/",
                ready=item.is_ready,
                idle_s=round(item.idle_s, 1),
                idle_timeout_s=item.idle_timeout_s,
                user=item.user,
                host_key=item.host_key,
            )
            for item in services.part(Endpoints)
            if not await _has_ended(services, item)
            if principal.is_admin
            or (principal.has_role("member") and item.owner_id == principal.user_id)
        ]
    )


@router.post("/interactive-tasks/{experiment_id}/link", status_code=201)
async def create_task_link(
    request: Request, experiment_id: IdPath, services: ServicesDep, principal: PrincipalDep
) -> TaskLink:
    """Create a link that opens a task in a browser once, as the same user."""
    await _require_port(services, experiment_id)
    if principal.user_id == 0:
        msg = "only users may open tasks"
        raise ForbiddenError(msg)
    code = services.keys.task_code(experiment_id, principal)
    return TaskLink(url=f"{_task_origin(request, services, experiment_id)}{ENTRY}?code={code}")


@router.post("/runs/{run_id}/port")
async def report_port(run_id: IdPath, report: PortReport, services: ServicesDep) -> IdleTime:
    """Report that the port of a task can be used; the run repeats it."""
    endpoints = services.part(Endpoints)
    endpoint = endpoints.of_run(run_id)
    if endpoint is None:
        experiment = await services.read(partial(_experiment_of, run_id=run_id))
        endpoint = Endpoint(experiment.id, run_id, experiment.owner_id, report.kind)
    endpoint = endpoints.put(endpoint)
    endpoint.last_seen = time.monotonic()
    endpoint.kind, endpoint.idle_timeout_s = report.kind, report.idle_timeout_s
    endpoint.user, endpoint.host_key = report.user, report.host_key
    if report.busy:
        endpoint.touch()
    return IdleTime(idle_s=endpoint.idle_s)


def _experiment_of(connection: Connection, run_id: int) -> ExperimentRow:
    run = find_row(connection, RunRow, run_id)
    return find_row(connection, ExperimentRow, run.experiment_id)


tunnels = APIRouter()


@tunnels.get("/api/v1/runs/{run_id}/tunnel", include_in_schema=False)
async def open_tunnel(request: Request, run_id: IdPath, services: ServicesDep) -> Response:
    """Keep the connection of a task, with ``Upgrade: tcp``, until a request needs it."""
    endpoint = services.part(Endpoints).of_run(run_id)
    if endpoint is None:
        msg = f"run {run_id} has not reported its port"
        raise NotFoundError(msg)
    if endpoint.is_full:
        msg = f"run {run_id} has enough waiting tunnels"
        raise BusyError(msg)
    upgrade = upgrade_of(request.scope)
    if upgrade is None:
        raise ConfigError("request", ["Upgrade: must be tcp, with Connection: upgrade"])
    return tunnel_response(upgrade, endpoint)


async def proxy(
    request: Request, experiment_id: str, services: ServicesDep, principal: PrincipalDep
) -> Response:
    """Forward a request to the port of a task; redirect browsers to the host of the task first."""
    number = int(experiment_id) if is_number(experiment_id) else 0
    endpoint = services.part(Endpoints).find(number)
    if endpoint is None or await _has_ended(services, endpoint):
        endpoint = None
        await _require_port(services, number)
    if principal.kind == "browser" and TASK not in request.scope:
        if request.method != "GET":
            msg = "a browser may use a task only at the host name of the task"
            raise ForbiddenError(msg)
        code = services.keys.task_code(number, principal)
        origin = _task_origin(request, services, number)
        return RedirectResponse(f"{origin}{ENTRY}?code={code}", 303)
    if endpoint is None:
        return waiting_page(f"Task {number} has not started yet. This page reloads.")
    keys = services.keys
    return await forward_request(
        request, endpoint, (keys.cookie, keys.task_cookie, keys.share_cookie)
    )


for _method in _METHODS:
    tunnels.add_api_route(
        _PATH,
        proxy,
        methods=["GET", "HEAD"] if _method == "GET" else [_method],
        include_in_schema=False,
    )
router.routes.extend(tunnels.routes)


async def _has_ended(services: Services, endpoint: Endpoint) -> bool:
    """Check whether the run of a task has ended, and forget it then."""
    ended = await services.open_runs.has_ended(services.read, endpoint.run_id)
    if ended:
        services.part(Endpoints).remove(endpoint)
    return ended


async def _require_port(services: Services, experiment_id: int) -> None:
    """Check that an experiment is a task with a port that has not ended.

    Raises:
        NotFoundError: If there is no such experiment, or it has no port.
        ConflictError: If it has ended.
    """

    def read(connection: Connection) -> ExperimentRow:
        return find_row(connection, ExperimentRow, experiment_id)

    experiment = await services.read(read)
    if PORT_LABEL not in msgspec.json.decode(experiment.labels):
        msg = f"experiment {experiment_id} has no port; `zerolab task run --port` starts one"
        raise NotFoundError(msg)
    if experiment.state in EXPERIMENT_ENDED:
        msg = f"task {experiment_id} has ended: {experiment.state}"
        raise ConflictError(msg)


def _task_origin(request: Request, services: Services, experiment_id: int) -> str:
    """Return the origin of a task's pages, as the browser of a request reaches it.

    Raises:
        ConflictError: If the server has no domain for tasks.
    """
    host, colon, port = request.headers["host"].rpartition(":")
    if not port.isdecimal():
        host, colon, port = request.headers["host"], "", ""
    domain = "localhost" if host in _LOOPBACK else services.settings.task_domain
    if not domain:
        msg = (
            "this server has no domain for interactive tasks; start it with --task-domain NAME, or "
            f"use ssh -L {port or 8080}:127.0.0.1:{services.settings.port} and the page at "
            f"http://localhost:{port or 8080}"
        )
        raise ConflictError(msg)
    return f"{request.url.scheme}://task-{experiment_id}.{domain}{colon}{port}"
