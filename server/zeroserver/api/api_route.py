"""Route class that injects services and a connection, and rejects unknown query parameters.

A request reads from the database on one thread.
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

from zeroserver.services import ReadDep, services_of

__all__ = ["ApiRoute"]

_REQUEST = "reading_request"
"""Name of the injected request parameter; no endpoint has a parameter of that name."""


class ApiRoute(APIRoute):
    """Route whose endpoint may have parameters :data:`ServicesDep` and :data:`ReadDep`.

    FastAPI would resolve each of them on every request, and on another thread. That takes half of
    the time of a small response, so this class passes them itself.

    FastAPI ignores unknown query parameters. A list with a misspelt filter would return everything,
    and a misspelt dry run would be executed. This class responds with 422 instead.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        options["generate_unique_id_function"] = attrgetter("name")
        super().__init__(path, _inject_dependencies(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        answer = super().get_route_handler()
        allowed = sorted(_parameters(self.dependant))

        async def checked(request: Request) -> Response:
            if unknown := [name for name in request.query_params if name not in allowed]:
                raise RequestValidationError([_unknown(name, allowed) for name in unknown])
            return await answer(request)

        return checked


def _parameters(of: Dependant) -> Iterator[str]:
    """Yield the query parameters of a route and of its dependencies."""
    yield from (parameter.alias for parameter in of.query_params)
    for dependency in of.dependencies:
        yield from _parameters(dependency)


def _unknown(name: str, allowed: list[str]) -> dict[str, Any]:
    from zerolab.schema.section import suggest  # a server starts without configuration

    listing = f"; there are: {', '.join(allowed)}" if allowed else "; there are none"
    problem = f"unknown parameter{suggest(name, allowed) or listing}"
    return {"type": "value_error", "loc": ("query", name[:80]), "ctx": {"error": problem}}


def _inject_dependencies(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an endpoint: it takes the request instead of the connection."""
    signature = inspect.signature(endpoint)
    names = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    connection_name = next((name for name, kind in names.items() if kind is ReadDep), None)
    if connection_name is None:
        return endpoint
    assert not inspect.iscoroutinefunction(endpoint), endpoint

    @wraps(endpoint)
    async def route(**values: Any) -> Any:
        services = services_of(values.pop(_REQUEST))
        return await services.read(
            lambda connection: endpoint(**values, **{connection_name: connection})
        )

    request_parameter = inspect.Parameter(
        _REQUEST, inspect.Parameter.KEYWORD_ONLY, annotation=Request
    )
    kept_parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != connection_name
    ]
    route.__signature__ = signature.replace(parameters=[*kept_parameters, request_parameter])  # type: ignore[attr-defined]
    del route.__wrapped__
    return route
