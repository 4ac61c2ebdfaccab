"""Addresses of MLflow's page, which its client prints, lead to the page of the server.

They are `/mlflow/#/experiments/1/runs/ID`. A browser does not send the part after `#`, so a script
reads it and asks for the address of the experiment.
"""

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Response
from fastapi.responses import HTMLResponse, JSONResponse
from sqlalchemy import Connection, select

from zerolab.errors import NotFoundError
from zeroserver.access.routes import ACCESS, PUBLIC, VIEWER
from zeroserver.extensions.mlflow_api.mapping import find_run, is_hidden
from zeroserver.extensions.mlflow_api.requests import PREFIX
from zeroserver.extensions.mlflow_api.tables import mlflow_experiments
from zeroserver.services import ServicesDep

__all__ = ["add_link_routes"]

_PAGE = (
    f'<!doctype html><title>Zerolab</title><script src="{PREFIX}links.js" defer></script>'
    '<p>This address opens the page of the run. <a href="/">All experiments</a>'
)
_SCRIPT = f"""
const pattern = /^#\\/experiments\\/(\\d{{1,18}})(?:\\/runs\\/([0-9a-f]{{32}}))?/;
const [, experiment = "", run = ""] = pattern.exec(location.hash) ?? [];
fetch(`{PREFIX}links?experiment=${{experiment}}&run=${{run}}`)
  .then((response) => (response.ok ? response.json() : {{ page: "/" }}))
  .then(({{ page }}) => location.replace(page));
"""


def add_link_routes(router: APIRouter) -> None:
    """Add the routes, and declare who may call them."""
    for path, function, access in (
        (PREFIX.rstrip("/"), open_page, PUBLIC),
        (PREFIX, open_page, PUBLIC),
        (f"{PREFIX}links.js", get_script, PUBLIC),
        (f"{PREFIX}links", find_page, VIEWER),
    ):
        ACCESS[f"GET {path}"] = access
        router.add_api_route(path, function, methods=["GET"], include_in_schema=False)


async def open_page() -> Response:
    """Return the page that opens the address behind its `#`."""
    return HTMLResponse(_PAGE)


async def get_script() -> Response:
    """Return the script of that page."""
    return Response(_SCRIPT, media_type="text/javascript")


async def find_page(
    services: ServicesDep,
    experiment: Annotated[str, Query(max_length=18)] = "",
    run: Annotated[str, Query(max_length=32)] = "",
) -> Response:
    """Return the address of a run's experiment, or of the list of an MLflow experiment's runs."""

    def read(connection: Connection) -> str:
        if run:
            return f"/#/experiments/{find_run(connection, run).experiment_id}"
        number = int(experiment) if experiment.isascii() and experiment.isdecimal() else -1
        columns = mlflow_experiments.c
        name: Any = connection.scalar(select(columns.name).where(columns.id == number))
        if name is None or is_hidden(services.orchestrator, number, str(name)):
            raise NotFoundError(f"Experiment with id={experiment} does not exist")
        return f"/#/experiments?find={quote(str(name))}"

    return JSONResponse({"page": await services.read(read)})
