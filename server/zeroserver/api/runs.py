"""Routes of agents and runs: plain Starlette with msgspec, since they are the hot ones.

FastAPI does not know them; :func:`describe` adds them to the OpenAPI document.
"""

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, select
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from zerolab.contract.spec import RunSpec
from zerolab.contract.wire import (
    MSGPACK,
    AgentRegistration,
    AgentWork,
    Directive,
    LogBatch,
    ReportBatch,
    RunExit,
    Stored,
    WorkItem,
)
from zerolab.errors import ConfigError, NotFoundError, StaleRunError
from zeroserver.api.common import MAX_ID, id_of
from zeroserver.orchestrator import ingest as reports
from zeroserver.orchestrator import runs as running
from zeroserver.orchestrator import scheduling
from zeroserver.orchestrator.desk import World, save
from zeroserver.services import Services, services_of
from zeroserver.states import RunState
from zeroserver.store.database import Change, Transaction
from zeroserver.store.schema import agents, runs, trials

__all__ = ["WIRE_ROUTES", "WireRoute", "describe"]

T = TypeVar("T")

MAX_WAIT_S = 30.0
"""Longest wait of a poll: half of what makes an agent dead."""


class Registered(msgspec.Struct, frozen=True):
    """Answer to a registration."""

    agent_id: int


class Empty(msgspec.Struct, frozen=True):
    """``{}``."""


@dataclass(frozen=True)
class WireRoute:
    """A route that speaks msgspec."""

    method: str
    path: str
    """Behind the prefix, e.g. ``/runs/{run_id}/reports``."""
    handler: Callable[[Request], Awaitable[Response]]
    answer: type[msgspec.Struct]
    body: type[msgspec.Struct] | None = None
    query: tuple[tuple[str, str, str], ...] = ()
    """Name, JSON type and meaning of each parameter."""
    msgpack: bool = False

    def route(self) -> Route:
        """Return it for Starlette."""
        return Route(f"/api/v1{self.path}", self.handler, methods=[self.method])


async def _body(request: Request, kind: type[T]) -> T:
    content = await request.body()
    decoder: Any = msgspec.json
    if request.headers.get("content-type", "").partition(";")[0].strip() == MSGPACK:
        decoder = msgspec.msgpack
    try:
        return decoder.decode(content, type=kind)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ConfigError("request", [f"body: {error}"]) from None


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _id(request: Request, name: str) -> int:
    text = request.path_params[name]
    found = id_of(text)
    if found is None:
        msg = f"there is no {name.removesuffix('_id')} {text[:100]}"
        raise NotFoundError(msg)
    return found


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
    known: int,
    wait_s: float,
    ask: Callable[[], Awaitable[tuple[int, T]]],
) -> T:
    """Ask until the version of the answer is not the ``known`` one, or the time is over."""
    end = time.monotonic() + min(max(wait_s, 0.0), MAX_WAIT_S)
    with services.hub.listen(topic) as bell:
        while True:
            if not services.hub.closed:
                bell.clear()
            version, answer = await ask()
            left = end - time.monotonic()
            if version != known or left <= 0 or services.hub.closed:
                return answer
            try:
                async with asyncio.timeout(left):
                    await bell.wait()
            except TimeoutError:
                continue


# -- agents ----------------------------------------------------------------------------------


async def register(request: Request) -> Response:
    """Register an agent with its slots; the same name is the same agent."""
    services = services_of(request)
    agent = await _body(request, AgentRegistration)
    if not 0 < len(agent.name) <= 255 or "\0" in agent.name + agent.host:
        raise ConfigError("agent", [f"name: must have 1 to 255 characters, got {agent.name!r}"])
    ids = [slot.id for slot in agent.slots]
    if len(set(ids)) != len(ids) or not all(0 <= each < 2**31 for each in ids):
        raise ConfigError("agent", [f"slots: ids must be different and at least 0, got {ids}"])
    agent_id = await services.write(lambda world, tx: _register(world, tx, agent))
    return _json(Registered(agent_id))


def _register(world: World, transaction: Transaction, agent: AgentRegistration) -> int:
    values = {
        "host": agent.host,
        "slots": msgspec.json.encode(agent.slots).decode(),
        "alive": 1,
        "registered_at": world.clock(),
    }
    known = transaction.connection.scalar(select(agents.c.id).where(agents.c.name == agent.name))
    if known is None:
        made = agents.insert().values(name=agent.name, **values).returning(agents.c.id)
        known = transaction.connection.execute(made).scalar_one()
    else:
        save(transaction, agents, known, **values)
    agent_id = int(known)
    world.seen[agent_id] = time.monotonic()
    scheduling.schedule(world, transaction)
    transaction.changes.append(Change("agents"))
    return agent_id


async def work(request: Request) -> Response:
    """Wait until what the agent must run differs from ``version``; also its heartbeat."""
    services = services_of(request)
    agent_id = _id(request, "agent_id")
    known = int(_number(request, "version", 0))
    wait_s = _number(request, "wait_s", 30.0)
    services.world.seen[agent_id] = time.monotonic()
    alive = await services.read(lambda connection: _alive(connection, agent_id))
    if not alive:
        await services.write(lambda world, tx: _revive(world, tx, agent_id))

    async def ask() -> tuple[int, AgentWork]:
        found = await services.read(lambda connection: _work(connection, services, agent_id))
        return found.version, found

    answer = await _wait_for(services, "agents", known, wait_s, ask)
    services.world.seen[agent_id] = time.monotonic()
    return _json(answer)


def _alive(connection: Connection, agent_id: int) -> bool:
    alive = connection.scalar(select(agents.c.alive).where(agents.c.id == agent_id))
    if alive is None:
        msg = f"there is no agent {agent_id}; register it"
        raise NotFoundError(msg)
    return bool(alive)


def _revive(world: World, transaction: Transaction, agent_id: int) -> None:
    save(transaction, agents, agent_id, alive=1)
    scheduling.schedule(world, transaction)


def _work(connection: Connection, services: Services, agent_id: int) -> AgentWork:
    columns = runs.c
    query = (
        select(columns.id, columns.experiment_id, columns.killed, columns.spec, columns.slot_ids)
        .where(columns.agent_id == agent_id, columns.state != RunState.EXITED)
        .order_by(columns.id)
    )
    items = []
    for row in connection.execute(query):
        stored = msgspec.json.decode(row.spec, type=RunSpec)
        token = services.keys.run_token(row.id)
        items.append(
            WorkItem(
                run_id=row.id,
                action="kill" if row.killed else "run",
                spec=msgspec.structs.replace(stored, master=services.url, token=token),
                archive=f"/api/v1/experiments/{row.experiment_id}/archive",
                slot_ids=msgspec.json.decode(row.slot_ids),
            )
        )
    state = [(item.run_id, item.action) for item in items]
    version = zlib.crc32(msgspec.json.encode(state)) + 1
    return AgentWork(version, items)


# -- runs ------------------------------------------------------------------------------------


async def started(request: Request) -> Response:
    """Say that the processes of a run are there."""
    run_id = _id(request, "run_id")
    services = services_of(request)
    await services.write(lambda world, tx: running.started(tx, run_id, world.clock()))
    return _json(Empty())


async def exited(request: Request) -> Response:
    """Say that the processes of a run are gone, and how; the server decides what follows."""
    run_id = _id(request, "run_id")
    services = services_of(request)
    end = await _body(request, RunExit)
    if not -(2**31) <= end.exit_code < 2**31:
        raise ConfigError("request", [f"exit_code: must be an exit code, got {end.exit_code}"])
    lines = end.log_tail.splitlines()
    matches = await run_in_threadpool(services.policies.search, run_id, lines)

    def job(world: World, transaction: Transaction) -> None:
        running.exited(world, transaction, run_id, end, matches)
        scheduling.schedule(world, transaction)

    await services.write(job)
    return _json(Empty())


async def store_reports(request: Request) -> Response:
    """Store records of a run exactly once; answered after the commit."""
    run_id = _id(request, "run_id")
    batch = await _body(request, ReportBatch)
    services = services_of(request)
    stored = await services.write(lambda world, tx: reports.store_reports(world, tx, run_id, batch))
    return _json(Stored(stored))


async def store_logs(request: Request) -> Response:
    """Store log lines of a run exactly once; answered after the commit."""
    run_id = _id(request, "run_id")
    batch = await _body(request, LogBatch)
    services = services_of(request)
    lines = [entry.text for entry in batch.entries]
    matches = await run_in_threadpool(services.policies.search, run_id, lines)
    stored = await services.write(
        lambda world, tx: reports.store_logs(world, tx, run_id, batch, matches)
    )
    return _json(Stored(stored))


_VERSIONS = {"train": 1, "preempt": 2, "stop": 3}


async def directive(request: Request) -> Response:
    """Wait until what the server wants of a run differs from ``version``."""
    services = services_of(request)
    run_id = _id(request, "run_id")
    known = int(_number(request, "version", 0))
    wait_s = _number(request, "wait_s", 30.0)

    async def ask() -> tuple[int, Directive]:
        found = await services.read(lambda connection: _directive(connection, services, run_id))
        return found.version, found

    return _json(await _wait_for(services, f"run:{run_id}", known, wait_s, ask))


def _directive(connection: Connection, services: Services, run_id: int) -> Directive:
    query = (
        select(runs.c.state, runs.c.directive, runs.c.deadline_at, trials.c.run_id)
        .join(trials, trials.c.id == runs.c.trial_id)
        .where(runs.c.id == run_id)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        msg = f"there is no run {run_id}"
        raise NotFoundError(msg)
    if row.state == RunState.EXITED or row.run_id != run_id:
        msg = f"run {run_id} has ended here, or another run has taken over"
        raise StaleRunError(msg)
    left = None
    if row.deadline_at is not None:
        left = max(row.deadline_at - services.world.steady(), 0.0)
    return Directive(row.directive, _VERSIONS[row.directive], left)


_POLL = (
    ("version", "integer", "Version of the last answer."),
    ("wait_s", "number", "Longest wait in seconds, at most 30."),
)

WIRE_ROUTES: Sequence[WireRoute] = (
    WireRoute("POST", "/agents", register, Registered, AgentRegistration),
    WireRoute("GET", "/agents/{agent_id}/work", work, AgentWork, query=_POLL),
    WireRoute("POST", "/runs/{run_id}/started", started, Empty),
    WireRoute("POST", "/runs/{run_id}/exited", exited, Empty, RunExit),
    WireRoute("POST", "/runs/{run_id}/reports", store_reports, Stored, ReportBatch, msgpack=True),
    WireRoute("POST", "/runs/{run_id}/logs", store_logs, Stored, LogBatch, msgpack=True),
    WireRoute("GET", "/runs/{run_id}/directive", directive, Directive, query=_POLL),
)


def describe(document: dict[str, Any]) -> None:
    """Add these routes to an OpenAPI document."""
    types = [each for route in WIRE_ROUTES for each in (route.body, route.answer) if each]
    (_, schemas) = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas)
    for route in WIRE_ROUTES:
        answer = {"$ref": f"#/components/schemas/{route.answer.__name__}"}
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
                    "content": {"application/json": {"schema": answer}},
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


def _parameter(name: str, place: str, kind: str, text: str = "") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind}
    if place == "path":
        schema |= {"minimum": 1, "maximum": MAX_ID}
    found: dict[str, Any] = {
        "name": name,
        "in": place,
        "required": place == "path",
        "schema": schema,
    }
    return found | ({"description": text} if text else {})
