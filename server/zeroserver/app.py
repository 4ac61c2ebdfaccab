"""FastAPI application: construction, startup and shutdown."""

import asyncio
import logging
import time
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from fastapi.routing import APIRoute, iter_route_contexts
from fastapi.staticfiles import StaticFiles
from pydantic.warnings import UnsupportedFieldAttributeWarning
from starlette.types import ASGIApp

from zerolab import __version__
from zerolab.paths import Home
from zerolab.registry import Registry
from zeroserver.access.guard import Guard, open_paths
from zeroserver.access.routes import EXTENSIONS
from zeroserver.access.tokens import TokenStore
from zeroserver.api import checkpoints, events, experiments, trials
from zeroserver.api.cluster import agents, server
from zeroserver.api.common import document_resources
from zeroserver.api.runs import WIRE_ROUTES, FastRoutes, describe
from zeroserver.errors import StoreError, install_error_handlers
from zeroserver.event_journal import Hub, Journal
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services
from zeroserver.settings import Settings
from zeroserver.store.archives import sweep_archives
from zeroserver.store.corruption import damaged_tables
from zeroserver.store.database import Change, Database
from zeroserver.store.engine_factory import sqlite_url
from zeroserver.store.migrate import lock_database, migrate

__all__ = ["DOCS", "STATIC", "create_app", "prepare"]

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0
"""Minimum time between identical log lines, in seconds."""

STATIC = Path(__file__).parent / "static"
DOCS = Path(__file__).parent / "docs"

_NO_PAGE = (
    "<!doctype html><meta charset=utf-8><title>Zerolab</title><h1>Zerolab</h1>"
    "<p>The server runs, but its web page was not built. The command line and the REST API "
    "under /api/v1 work without it."
)
_NO_DOCS = (
    "<!doctype html><meta charset=utf-8><title>Zerolab</title><h1>No documentation</h1>"
    "<p>This installation contains no documentation. In a checkout, run <code>make docs</code> "
    "and restart the server. The same pages are in its folder <code>docs</code>."
)


def create_app(settings: Settings, static: Path = STATIC, docs: Path = DOCS) -> FastAPI:
    """Create the application of a server; it opens no resources before its startup.

    Args:
        settings: Settings of the server.
        static: Directory of the built page.
        docs: Directory of the built documentation.
    """
    app = _Application(
        title="Zerolab",
        version=__version__,
        docs_url=None,  # its page loads external scripts; /docs is the documentation
        redoc_url=None,
        openapi_url="/api/v1/openapi.json",
        lifespan=_lifespan,
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
        },  # avoids lookups in each request
    )
    services = _services(settings)
    app.state.services = services
    install_error_handlers(app)
    _add_routes(app)
    _add_page(app, static)
    _add_docs(app, docs)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


class _Application(FastAPI):
    """FastAPI application with access control and wire routes."""

    def build_middleware_stack(self) -> ASGIApp:
        """Put the guard and the wire routes before FastAPI's layers, which reports do not need."""
        services: Services = self.state.services
        return Guard(
            FastRoutes(super().build_middleware_stack(), WIRE_ROUTES),
            services.keys,
            services.settings,
            self.router.routes,
            has_ended=partial(services.open_runs.has_ended, services.read),
            ownership=services.ownership,
            record=services.record_change,
            times=services.request_times,
        )


def _add_routes(app: FastAPI) -> None:
    """Add all routes; the first match serves a request, so literal paths precede parameters."""
    for wire in WIRE_ROUTES:
        app.router.routes.append(wire.route())
    app.state.missing = ROUTERS.missing()
    for name in ROUTERS:  # first, since they have literal paths such as `experiments/columns`
        problem = ROUTERS.problem(name)
        if problem is not None:
            logger.error("routes of an extension are left out: %s", problem)
        elif _is_ours(ROUTERS[name]):
            app.router.routes.extend(ROUTERS[name].routes)
        else:
            app.include_router(ROUTERS[name])
    # include_router would build each route again at the first request: 40 ms of CPU and 1 MB for
    # our 76 routes, and 11 % more CPU for each small response.
    modules = (checkpoints, experiments, trials, events, server, agents)
    for module in modules:
        app.router.routes.extend(module.router.routes)


def _is_ours(router: APIRouter) -> bool:
    """Check whether a router is built-in; only built-in routers may use any path."""
    modules = (getattr(route, "endpoint", router).__module__ for route in router.routes)
    return all(module.startswith("zeroserver.extensions.") for module in modules)


def _router(loaded: Any) -> APIRouter:
    if not isinstance(loaded, APIRouter):
        raise TypeError(f"must be a fastapi.APIRouter, got {loaded!r}")
    for route in loaded.routes:
        if not isinstance(route, APIRoute):
            raise TypeError(f"its routes must be HTTP routes, got {route!r}")
    if not _is_ours(loaded) and not all(
        getattr(route, "path", "").startswith(EXTENSIONS) for route in loaded.routes
    ):
        raise TypeError(f"its routes must be below {EXTENSIONS}")
    return loaded


ROUTERS: Registry[APIRouter] = Registry("zeroserver.routers", {}, _router)
"""Routers of extensions."""


class Supervisor(Protocol):
    """Work of an extension that needs no request; called on the event loop's thread."""

    async def tick(self) -> None:
        """Do what is due; called by each tick."""

    def close(self) -> None:
        """Stop; called once, when the server stops."""


SUPERVISORS: Registry[Callable[[Services], Supervisor]] = Registry("zeroserver.supervisors", {})
"""Supervisors of extensions; each is made once from the services."""


def _services(settings: Settings) -> Services:
    home = Home(settings.home).create()
    hub = Hub()
    journal = Journal(hub)
    timings = settings.timings
    orchestrator = Orchestrator(settings, home, journal)
    users, shares = orchestrator.users, orchestrator.shares
    keys = TokenStore(home, users, shares, timings.session_s, timings.login_code_s)

    def publish(changes: list[Change]) -> None:
        loop = services.loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(services.publish, changes)

    url = settings.database_url or sqlite_url(home.database)
    database = Database(url, publish, settings.synchronous)
    services = Services(settings, database, hub, journal, orchestrator, keys)
    return services


def prepare(services: Services) -> None:
    """Lock and migrate the database and do other startup work; no effect if already done.

    Raises:
        ConflictError: If another program or a newer version created the database, or another server
            uses it.
        ConfigError: If it cannot be opened.
        StoreError: If it is damaged, or its disk is full.
    """
    database = services.database
    if database.started:
        return
    try:
        lock_database(database)
        migrate(database, services.orchestrator.home)
        with database.read() as connection:
            services.orchestrator.users.load(connection)
            services.orchestrator.projects.load(connection)
            services.orchestrator.defaults.load(connection)
            services.orchestrator.shares.load(connection)
        database.start()
        database.write_now(database.lock.sign)
        database.write_now(
            lambda transaction: UnitOfWork(
                services.orchestrator, transaction
            ).periodic.bound_deadlines()
        )
        sweep_archives(database, services.orchestrator.home.archives)
    except StoreError as error:
        if isinstance(error.__cause__, OSError):  # the message names another file
            raise
        file = services.orchestrator.home.database
        tables = damaged_tables(file) if error.damaged and database.sqlite else []
        raise StoreError.of_start(database.name, error, tables) from error


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    services.loop = asyncio.get_running_loop()
    services.started_at = time.time()
    await asyncio.to_thread(prepare, services)
    await services.load_large_searches()
    services.orchestrator.janitor.start(services.database)
    supervisors = [SUPERVISORS[name](services) for name in SUPERVISORS]
    ticking = asyncio.create_task(_tick_forever(services, supervisors))
    try:
        yield
    finally:
        services.hub.close()
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking
        await services.stop_computing()
        for supervisor in supervisors:
            supervisor.close()
        services.loop = None
        await asyncio.to_thread(services.orchestrator.janitor.close)
        await asyncio.to_thread(services.database.close)


async def _tick_forever(services: Services, supervisors: Sequence[Supervisor]) -> None:
    with suppress(StoreError):  # the next start retries
        await services.write(lambda work: work.orphans.find())
        await services.resume()
    last_error, quiet_until = "", 0.0
    expire_at = 0.0
    while True:
        services.orchestrator.agents.note_tick()
        services.journal.tidy()
        try:
            await services.write(lambda work: work.periodic.tick())
            while services.orchestrator.queue.unfinished:
                await services.write(lambda work: work.periodic.tick())
            await services.apply_states()
            await services.execute_operations()
            await services.apply_policies()
            await services.remove_orphans()
            if services.orchestrator.metrics.purge_due:
                await services.purge_names()
            for supervisor in supervisors:
                await supervisor.tick()
            if time.monotonic() >= expire_at:
                expire_at = time.monotonic() + services.settings.timings.expiry_s
                while await services.write(lambda work: work.logs.expire()):
                    pass
                if services.orchestrator.metrics.thinned is None:  # else it is in progress
                    services.orchestrator.metrics.thinned = ()
            if services.orchestrator.metrics.thinned is not None:  # a part at each tick
                await services.write(lambda work: work.metric_retention.expire())
        except StoreError as error:
            if str(error) != last_error or time.monotonic() >= quiet_until:  # not at every tick
                last_error, quiet_until = str(error), time.monotonic() + _LOG_INTERVAL_S
                logger.warning("the periodic tick failed; retrying: %s", error)
        except Exception:  # the loop must continue; the log has the traceback
            logger.exception("the periodic tick failed; retrying")
        services.ticks += 1
        await asyncio.sleep(services.settings.timings.tick_s)


def _add_page(app: FastAPI, static: Path) -> None:
    assets = static / "assets"
    if assets.is_dir():
        app.mount("/assets", StaticFiles(directory=assets), name="assets")

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        index = static / "index.html"
        if not index.is_file():
            return HTMLResponse(_NO_PAGE)
        return FileResponse(index, media_type="text/html")


def _add_docs(app: FastAPI, docs: Path) -> None:
    built = (docs / "index.html").is_file()

    @app.get("/docs", include_in_schema=False)
    def documentation() -> Response:
        return RedirectResponse("/docs/") if built else HTMLResponse(_NO_DOCS, status_code=404)

    if built:
        app.mount("/docs", StaticFiles(directory=docs, html=True), name="docs")


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        with warnings.catch_warnings():  # models built late: __main__
            warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        describe(document)
        models = (
            getattr(route, "response_model", None) for route in iter_route_contexts(app.routes)
        )
        document_resources(document, models)
        bearer = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"token": bearer}
        document["security"] = [{"token": []}]
        for path in open_paths() & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
        app.openapi_schema = document
    return app.openapi_schema
