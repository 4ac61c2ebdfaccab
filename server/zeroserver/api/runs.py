"""Routes of agents and runs, implemented with Starlette and msgspec for speed.

FastAPI does not include them; :func:`describe` adds them to the OpenAPI document.
"""

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, func, select
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from zerolab.contract.messages import (
    KILL_GRACE_S,
    LEAVE_GRACE_S,
    MSGPACK,
    AgentLeave,
    AgentLoad,
    AgentRegistration,
    AgentWork,
    BatchReceipt,
    BoundReached,
    Directive,
    Extension,
    LogBatch,
    RendezvousAddress,
    ReportBatch,
    RunActivity,
    RunExit,
    WorkItem,
)
from zerolab.contract.names import text_problem
from zerolab.contract.spec import Nodes, RunSpec
from zerolab.errors import ConfigError, NotFoundError, StaleRunError, ZerolabError
from zeroserver.access.principal import principal_of
from zeroserver.api.common import MAX_ID, id_of
from zeroserver.errors import bug_response, error_response
from zeroserver.orchestrator.cluster.agent_service import check
from zeroserver.orchestrator.cluster.scheduler_input import OPEN_RUNS
from zeroserver.orchestrator.ingest.log_service import split_logs
from zeroserver.orchestrator.ingest.report_service import split_reports
from zeroserver.orchestrator.lifecycle import exit_cause
from zeroserver.orchestrator.log_policies import Match
from zeroserver.orchestrator.node_service import kills_others, nodes_of
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services, services_of
from zeroserver.states import RunState
from zeroserver.store.schema import agents, experiments, run_nodes, runs, trials

__all__ = ["WIRE_ROUTES", "FastRoutes", "WireRoute", "describe"]

T = TypeVar("T")

Handler = Callable[[Request], Awaitable[Response]]

_MSGPACK = MSGPACK.encode()

_ADDRESS = 255
"""Maximum length of an address."""

MAX_WAIT_S = 30.0
"""Maximum duration of a long poll, in seconds."""


class Registered(msgspec.Struct, frozen=True):
    """Response to a registration."""

    agent_id: int
    token: str = ""
    """Join token for an agent that registered with an administrator's token, so that a renewal of
    that token does not affect the agent."""


class Empty(msgspec.Struct, frozen=True):
    """Empty response, ``{}``."""


class WireRoute(msgspec.Struct, frozen=True):
    """Starlette route with msgspec bodies."""

    method: str
    path: str
    """Path without the prefix, e.g. ``/runs/{run_id}/reports``."""
    handler: Handler
    answer: type[msgspec.Struct]
    body: type[msgspec.Struct] | None = None
    query: tuple[tuple[str, str, str], ...] = ()
    """Name, JSON type and description of each parameter."""
    msgpack: bool = False

    def route(self) -> Route:
        """Return the Starlette route."""
        return Route(f"/api/v1{self.path}", self.handler, methods=[self.method])


async def _body(request: Request, kind: type[T]) -> T:
    chunks: list[bytes] = []
    more = True
    while more:  # request.body() would take longer than decoding a report
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    decoder: Any = msgspec.json
    content_type = dict(request.scope["headers"]).get(b"content-type", b"")
    if content_type.partition(b";")[0].strip() == _MSGPACK:
        decoder = msgspec.msgpack
    try:
        return decoder.decode(b"".join(chunks), type=kind)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ConfigError("request", [f"body: {error}"]) from None


class _Answer(Response):
    """JSON response with a struct."""

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Set only the two headers of every response, for speed."""
        length = b"%d" % len(self.body)
        self.raw_headers = [(b"content-length", length), (b"content-type", b"application/json")]


def _json(value: msgspec.Struct) -> Response:
    return _Answer(msgspec.json.encode(value))


def _id(request: Request, name: str) -> int:
    text = request.path_params[name]
    number = id_of(text)
    if number is None:
        msg = f"there is no {name.removesuffix('_id')} {text[:100]}"
        raise NotFoundError(msg)
    return number


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    try:
        number = float(text)
        if not -MAX_ID <= number <= MAX_ID:  # NaN too
            raise ValueError(text)
    except ValueError:
        problem = f"{name}: must be a number, got {text[:100]!r}"
        raise ConfigError("request", [problem]) from None
    return number


async def _wait_for(
    services: Services,
    topic: str,
    seen_version: int,
    wait_s: float,
    read_state: Callable[[], Awaitable[tuple[int, T]]],
) -> T:
    """Return the state once its version differs from ``seen_version`` or the wait ends."""
    deadline = time.monotonic() + min(max(wait_s, 0.0), MAX_WAIT_S)
    with services.hub.listen(topic) as event:
        while True:
            if not services.hub.closed:
                event.clear()
            version, state = await read_state()
            remaining = deadline - time.monotonic()
            if version != seen_version or remaining <= 0 or services.hub.closed:
                return state
            try:
                async with asyncio.timeout(remaining):
                    await event.wait()
            except TimeoutError:
                continue


# -- agents ----------------------------------------------------------------------------------


async def register(request: Request) -> Response:
    """Register an agent with its slots, or update the agent with that name."""
    services = services_of(request)
    agent = await _body(request, AgentRegistration)
    check(agent)

    def job(work: UnitOfWork) -> int:
        agent_id = work.agents.join(agent)
        work.scheduling.schedule()
        return agent_id

    agent_id = await services.write(job)
    is_user = principal_of(request).kind == "user"
    return _json(Registered(agent_id, services.keys.agent_token if is_user else ""))


async def work(request: Request) -> Response:
    """Wait until the work of an agent differs from ``version``; also its heartbeat."""
    return await _wait_for_work(request, None)


async def report_load(request: Request) -> Response:
    """Store the load of an agent, and wait until its work differs from ``version``."""
    return await _wait_for_work(request, await _body(request, AgentLoad))


async def _wait_for_work(request: Request, load: AgentLoad | None) -> Response:
    services = services_of(request)
    agent_id = _id(request, "agent_id")
    seen_version = int(_number(request, "version", 0))
    max_wait_s = services.settings.timings.agent_wait_s
    wait_s = min(_number(request, "wait_s", 30.0), max_wait_s)
    identity = request.query_params.get("identity", "")
    alive = await services.read(lambda connection: _alive(connection, agent_id, identity))
    services.orchestrator.agents.note_request(agent_id, load)
    if not alive:
        await services.write(lambda work: _revive(work, agent_id))

    async def ask() -> tuple[int, AgentWork]:
        renewals = services.keys.generation  # renewed tokens must reach agents soon
        assigned = await services.read(lambda connection: _work(connection, services, agent_id))
        assigned = msgspec.structs.replace(assigned, version=assigned.version + (renewals << 32))
        return assigned.version, assigned

    reply = await _wait_for(services, "agents", seen_version, wait_s, ask)
    services.orchestrator.agents.seen[agent_id] = time.monotonic()
    return _json(reply)


def _alive(connection: Connection, agent_id: int, identity: str) -> bool:
    """Check whether an agent is marked as alive.

    Raises:
        NotFoundError: If there is no such agent, or another agent has its name now.
    """
    query = select(agents.c.alive, agents.c.identity).where(agents.c.id == agent_id)
    row = connection.execute(query).one_or_none()
    if row is None or (identity and row.identity not in {"", identity}):
        msg = f"there is no agent {agent_id}; register it"
        raise NotFoundError(msg)
    return bool(row.alive)


def _revive(work: UnitOfWork, agent_id: int) -> None:
    work.agents.revive(agent_id)
    work.scheduling.schedule()


async def leave(request: Request) -> Response:
    """Record that an agent is stopping and gets no new runs, or with ``done`` has stopped."""
    services = services_of(request)
    agent_id = _id(request, "agent_id")
    body = await _body(request, AgentLeave)

    def job(work: UnitOfWork) -> bool:
        removed = work.agents.leave(agent_id, done=body.done)
        work.scheduling.schedule()
        return removed

    while not await services.write(job):
        pass
    return _json(Empty())


def _work(connection: Connection, services: Services, agent_id: int) -> AgentWork:
    columns = runs.c
    query = (
        select(
            columns.id,
            columns.experiment_id,
            columns.killed,
            columns.directive,
            columns.spec,
            func.coalesce(run_nodes.c.slot_ids, columns.slot_ids).label("slot_ids"),
            run_nodes.c.node_rank,
        )
        .outerjoin(run_nodes, run_nodes.c.run_id == columns.id)
        .where(
            func.coalesce(run_nodes.c.agent_id, columns.agent_id) == agent_id,
            columns.state.in_(OPEN_RUNS),
            run_nodes.c.ended_at.is_(None),
        )
        .order_by(columns.id)
    )
    items = [_item(connection, services, row) for row in connection.execute(query)]
    records = [item for item in items if item is not None]
    state = [(item.run_id, item.action) for item in records]
    version = zlib.crc32(msgspec.json.encode(state)) + 1
    return AgentWork(version, records)


def _item(connection: Connection, services: Services, row: Any) -> WorkItem | None:
    """Return the work item of a run; None until its rendezvous address is known."""
    stored = msgspec.json.decode(row.spec, type=RunSpec)
    nodes, action = stored.nodes, "kill" if row.killed else "run"
    hosts: tuple[str, ...] = ()
    if nodes is not None:
        all_nodes = nodes_of(connection, row.id)
        if any(map(kills_others, all_nodes)):
            action = "kill"
        host, _, port = (all_nodes[0].address or "").rpartition(":")
        if row.node_rank > 0 and not host:
            return None
        nodes = Nodes(nodes.slots, row.node_rank, host, int(port or 0))
        hosts = tuple(node.host or "" for node in all_nodes)
    token = services.keys.run_token(row.id)
    spec = msgspec.structs.replace(
        stored, master=services.url, token=token, nodes=nodes, host_names=hosts
    )
    return WorkItem(
        run_id=row.id,
        action="kill" if action == "kill" else "run",
        spec=spec,
        archive=f"/api/v1/experiments/{row.experiment_id}/archive",
        slot_ids=msgspec.json.decode(row.slot_ids),
        grace_s=LEAVE_GRACE_S if row.directive == "stop" else KILL_GRACE_S,
    )


# -- runs ------------------------------------------------------------------------------------


async def started(request: Request) -> Response:
    """Record that the processes of a run have started."""
    run_id = _id(request, "run_id")
    services = services_of(request)
    await services.write(lambda work: work.runs.started(run_id, work.clock()))
    return _json(Empty())


async def activity(request: Request) -> Response:
    """Set the activity of a run before its ranks start, such as staging data."""
    run_id = _id(request, "run_id")
    text = (await _body(request, RunActivity)).text
    await services_of(request).write(lambda work: work.runs.show_activity(run_id, text))
    return _json(Empty())


async def meeting(request: Request) -> Response:
    """Set the rendezvous address of a run on several agents; the first agent sends it."""
    run_id = _id(request, "run_id")
    rendezvous = await _body(request, RendezvousAddress)
    wrong = (
        not rendezvous.address
        or len(rendezvous.address) > _ADDRESS
        or text_problem(rendezvous.address)
    )
    if wrong or not 0 < rendezvous.port < 2**16:
        received = f"{rendezvous.address[:100]!r} and {rendezvous.port}"
        raise ConfigError("request", [f"address, port: must be those of a machine, got {received}"])
    address = f"{rendezvous.address}:{rendezvous.port}"
    await services_of(request).write(lambda work: work.nodes.store_address(run_id, address))
    return _json(Empty())


async def exited(request: Request) -> Response:
    """Record how the processes of a run ended; the server decides whether it restarts."""
    run_id = _id(request, "run_id")
    services = services_of(request)
    end = await _body(request, RunExit)
    if not -(2**31) <= end.exit_code < 2**31:
        raise ConfigError("request", [f"exit_code: must be an exit code, got {end.exit_code}"])
    lines = end.log_tail.splitlines()
    matches = await run_in_threadpool(services.policies.search, run_id, lines)

    def job(work: UnitOfWork) -> None:
        work.exits.end_run(run_id, end, matches)
        work.scheduling.schedule()

    await services.write(job)
    return _json(Empty())


async def store_reports(request: Request) -> Response:
    """Store records of a run exactly once; responds after the commit."""
    run_id = _id(request, "run_id")
    batch = await _body(request, ReportBatch)
    services = services_of(request)
    stored = 0
    for part in split_reports(batch):  # other jobs may run in between

        def job(work: UnitOfWork, part: ReportBatch = part) -> int:
            return work.reports.store(run_id, part)

        stored = await services.write(job)
    return _json(BatchReceipt(stored))


async def extend(request: Request) -> Response:
    """Return whether a promoted run may continue beyond its bound with the same slots."""
    run_id = _id(request, "run_id")
    bound = await _body(request, BoundReached)
    services = services_of(request)
    reply = await services.write(lambda work: work.scheduling.extend(run_id, bound.until))
    return _json(reply)


async def store_logs(request: Request) -> Response:
    """Store log lines of a run exactly once; responds after the commit."""
    run_id = _id(request, "run_id")
    batch = await _body(request, LogBatch)
    services = services_of(request)
    stored, by_run = 0, principal_of(request).kind == "run"
    for part in split_logs(batch):  # other jobs may run in between
        lines = [entry.text for entry in part.entries]
        matches = await run_in_threadpool(services.policies.search, run_id, lines)

        def job(
            work: UnitOfWork,
            part: LogBatch = part,
            matches: Sequence[Match] = matches,
        ) -> int:
            return work.logs.store(run_id, part, matches, by_run=by_run)

        stored = await services.write(job)
    return _json(BatchReceipt(stored))


_VERSIONS = {"train": 1, "preempt": 2, "stop": 3}


async def directive(request: Request) -> Response:
    """Wait until the directive of a run differs from ``version``."""
    services = services_of(request)
    run_id = _id(request, "run_id")
    seen_version = int(_number(request, "version", 0))
    wait_s = _number(request, "wait_s", 30.0)

    services.orchestrator.polling_runs.add(run_id)

    async def ask() -> tuple[int, Directive]:
        reply = await services.read(lambda connection: _directive(connection, services, run_id))
        return reply.version, reply

    return _json(await _wait_for(services, f"run:{run_id}", seen_version, wait_s, ask))


def _directive(connection: Connection, services: Services, run_id: int) -> Directive:
    query = (
        select(
            runs.c.state, runs.c.directive, runs.c.deadline_at, trials.c.run_id,
            trials.c.stop, trials.c.held, trials.c.waits,
            experiments.c.state.label("experiment_state"),
        )
        .join(trials, trials.c.id == runs.c.trial_id)
        .join(experiments, experiments.c.id == trials.c.experiment_id)
        .where(runs.c.id == run_id)
    )  # fmt: skip
    row = connection.execute(query).one_or_none()
    if row is None:
        msg = f"there is no run {run_id}"
        raise NotFoundError(msg)
    if row.state == RunState.EXITED or row.run_id != run_id:
        msg = f"run {run_id} has ended here, or another run has taken over"
        raise StaleRunError(msg)
    remaining = None
    if row.deadline_at is not None:
        remaining = max(row.deadline_at - services.orchestrator.steady(), 0.0)
    cause = None if row.directive == "train" else exit_cause(row, row.experiment_state)
    return Directive(row.directive, _VERSIONS[row.directive], remaining, cause)


_POLL = (
    ("version", "integer", "Version of the last response."),
    ("wait_s", "number", "Maximum wait in seconds, at most 30."),
)

_IDENTITY = ("identity", "string", "Identity that the agent sent when it registered.")

WIRE_ROUTES: Sequence[WireRoute] = (
    WireRoute("POST", "/agents", register, Registered, AgentRegistration),
    WireRoute("GET", "/agents/{agent_id}/work", work, AgentWork, query=(*_POLL, _IDENTITY)),
    WireRoute(
        "POST",
        "/agents/{agent_id}/work",
        report_load,
        AgentWork,
        AgentLoad,
        query=(*_POLL, _IDENTITY),
    ),
    WireRoute("POST", "/agents/{agent_id}/leave", leave, Empty, AgentLeave),
    WireRoute("POST", "/runs/{run_id}/started", started, Empty),
    WireRoute("POST", "/runs/{run_id}/activity", activity, Empty, RunActivity),
    WireRoute("POST", "/runs/{run_id}/meeting", meeting, Empty, RendezvousAddress),
    WireRoute("POST", "/runs/{run_id}/exited", exited, Empty, RunExit),
    WireRoute(
        "POST", "/runs/{run_id}/reports", store_reports, BatchReceipt, ReportBatch, msgpack=True
    ),
    WireRoute("POST", "/runs/{run_id}/extend", extend, Extension, BoundReached),
    WireRoute("POST", "/runs/{run_id}/logs", store_logs, BatchReceipt, LogBatch, msgpack=True),
    WireRoute("GET", "/runs/{run_id}/directive", directive, Directive, query=_POLL),
)


class FastRoutes:
    """ASGI layer that calls the handlers of wire routes without the router.

    FastAPI and Starlette would take 46 of the 366 microseconds of CPU time of a report. The router
    has the same routes and serves requests that do not match here, such as those with a wrong
    method.

    Args:
        app: Next layer, for all other requests.
        routes: Routes; those of the form ``/COLLECTION/{id}/NAME`` are called here.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[WireRoute]) -> None:
        self._app = app
        self._handlers: dict[tuple[str, str, str], tuple[str, Handler, Route]] = {}
        for route in routes:
            parts = route.path.split("/")
            if len(parts) == 4 and parts[2].startswith("{"):
                handler = (parts[2][1:-1], route.handler, route.route())
                self._handlers[route.method, f"/api/v1/{parts[1]}", parts[3]] = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve requests of these routes; pass all others to the next layer."""
        if scope["type"] == "http" and not scope.get("root_path"):
            parent, _, name = scope["path"].rpartition("/")
            collection, _, number = parent.rpartition("/")
            match = self._handlers.get((scope["method"], collection, name))
            if match is not None and number:
                scope["path_params"] = {match[0]: number}
                scope["route"] = match[2]
                await self._serve(match[1], scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _serve(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await handler(Request(scope, receive))
        except (ZerolabError, ClientDisconnect) as error:
            response = error_response(error)
        except Exception as error:  # noqa: BLE001 - logged
            response = bug_response(scope, error)
        await response(scope, receive, send)


def describe(document: dict[str, Any]) -> None:
    """Add these routes to an OpenAPI document."""
    types = [struct for route in WIRE_ROUTES for struct in (route.body, route.answer) if struct]
    (_, schemas) = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas)
    for route in WIRE_ROUTES:
        response = {"$ref": f"#/components/schemas/{route.answer.__name__}"}
        operation: dict[str, Any] = {
            "tags": ["agents and runs"],
            "summary": route.handler.__name__.replace("_", " ").title(),
            "description": (route.handler.__doc__ or "").strip(),
            "operationId": route.handler.__name__,
            "parameters": [_parameter(name, "path", "integer") for name in _names(route.path)]
            + [_parameter(name, "query", kind, text) for name, kind, text in route.query],
            "responses": {
                "200": {
                    "description": "Done.",
                    "content": {"application/json": {"schema": response}},
                },
            },
        }
        if route.body is not None:
            body = {"schema": {"$ref": f"#/components/schemas/{route.body.__name__}"}}
            content = {"application/json": body} | ({MSGPACK: body} if route.msgpack else {})
            operation["requestBody"] = {"required": True, "content": content}
        path = document["paths"].setdefault(f"/api/v1{route.path}", {})
        path[route.method.lower()] = operation


def _names(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


def _parameter(name: str, location: str, kind: str, text: str = "") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind}
    if location == "path":
        schema |= {"minimum": 1, "maximum": MAX_ID}
    parameter: dict[str, Any] = {
        "name": name,
        "in": location,
        "required": location == "path",
        "schema": schema,
    }
    return parameter | ({"description": text} if text else {})
