"""Routes are handed the services and a connection, and refuse parameters that they do not have.

One thread does all of what a request reads.
"""

import inspect
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from operator import attrgetter
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from zeroserver.services import ReadDep, ServicesDep, services_of

__all__ = ["ReadingRoute"]

_REQUEST = "reading_request"
"""Parameter of a route that was made here; no route has one of that name itself."""


class ReadingRoute(APIRoute):
    """A route whose function may ask for :data:`ServicesDep` and :data:`ReadDep`.

    As dependencies of FastAPI, each would be looked up by a walk of its own in every request, on a
    thread of its own: half of what a small answer costs.

    FastAPI passes over a query parameter that no route has: a list with a misspelt filter would be
    a list of everything, and an act that was to be a trial of it would be done. Here it is refused.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        options["generate_unique_id_function"] = attrgetter("name")
        super().__init__(path, _handed(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        answer = super().get_route_handler()
        known = sorted(_parameters(self.dependant))

        async def checked(request: Request) -> Response:
            if unknown := [name for name in request.query_params if name not in known]:
                raise RequestValidationError([_unknown(name, known) for name in unknown])
            return await answer(request)

        return checked


def _parameters(of: Dependant) -> Iterator[str]:
    """Names of the query parameters of a route, and of what it depends on."""
    yield from (each.alias for each in of.query_params)
    for dependency in of.dependencies:
        yield from _parameters(dependency)


def _unknown(name: str, known: list[str]) -> dict[str, Any]:
    from zerolab.schema.section import suggest  # a server starts without configuration

    there = f"; there are: {', '.join(known)}" if known else "; there are none"
    problem = f"unknown parameter{suggest(name, known) or there}"
    return {"type": "value_error", "loc": ("query", name[:80]), "ctx": {"error": problem}}


def _handed(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that FastAPI gives the request in place of what is handed over here."""
    signature = inspect.signature(endpoint)
    names = {each.name: each.annotation for each in signature.parameters.values()}
    services_name = next((name for name, kind in names.items() if kind is ServicesDep), None)
    connection_name = next((name for name, kind in names.items() if kind is ReadDep), None)
    if services_name is None and connection_name is None:
        return endpoint
    waits = inspect.iscoroutinefunction(endpoint)
    assert not (waits and connection_name), f"{endpoint}: reads, so it must not be a coroutine"

    @wraps(endpoint)
    async def route(**values: Any) -> Any:
        services = services_of(values.pop(_REQUEST))
        if services_name is not None:
            values[services_name] = services
        if connection_name is not None:
            return await services.read(
                lambda connection: endpoint(**values, **{connection_name: connection})
            )
        return await endpoint(**values) if waits else await run_in_threadpool(endpoint, **values)

    asked = inspect.Parameter(_REQUEST, inspect.Parameter.KEYWORD_ONLY, annotation=Request)
    others = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, each in signature.parameters.items()
        if name not in {services_name, connection_name}
    ]
    route.__signature__ = signature.replace(parameters=[*others, asked])  # type: ignore[attr-defined]
    del route.__wrapped__
    return route
