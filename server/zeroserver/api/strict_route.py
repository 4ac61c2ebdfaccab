"""Router whose routes reject unknown query parameters and JSON that is not strict."""

from collections.abc import Callable, Coroutine, Iterator
from operator import attrgetter
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.routing import compile_path

from zeroserver.api.rows import ResourceResponse

__all__ = ["StrictRoute", "resource_router"]


class _StrictRequest(Request):
    """Request with a strictly parsed body: Python's parser accepts NaN and lone surrogates."""

    async def json(self) -> Any:
        """Return the body.

        Raises:
            HTTPException: If it is not JSON.
        """
        try:
            return msgspec.json.decode(await self.body())
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            msg = f"body: must be JSON, with finite numbers and whole characters only ({error})"
            raise HTTPException(422, msg) from None


class StrictRoute(APIRoute):
    """Route that responds with 422 where FastAPI would be lenient.

    FastAPI ignores unknown query parameters. A list with a misspelt filter would return everything,
    and a misspelt dry run would be executed.

    Its parameters and response model are read when they are first needed: by a request, or for the
    OpenAPI document. Reading those of all routes would take an eighth of the server's start.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Store what decides whether a request matches; the arguments are those of FastAPI."""
        self.path, self.endpoint, self.methods = path, endpoint, set(options["methods"])
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self._options = options

    def __getattr__(self, name: str) -> Any:
        """Read the parameters and the response model; called for an attribute that is missing."""
        options = self.__dict__.pop("_options", None)
        if options is None:
            raise AttributeError(name)
        super().__init__(self.path, self.endpoint, **options)
        return getattr(self, name)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handle = super().get_route_handler()
        allowed = sorted(_query_parameters(self.dependant))

        async def handle_strictly(request: Request) -> Response:
            if unknown := [name for name in request.query_params if name not in allowed]:
                raise RequestValidationError([_unknown(name, allowed) for name in unknown])
            # FastAPI's own request attributes live in the scope, so they are kept.
            return await handle(_StrictRequest(request.scope, request.receive, request._send))  # noqa: SLF001 - FastAPI documents this way to a custom request

        return handle_strictly


def resource_router(prefix: str, tag: str) -> APIRouter:
    """Return a router of strict routes that may respond with a resource.

    Args:
        prefix: Beginning of all paths.
        tag: Section of the OpenAPI document.
    """
    return APIRouter(
        prefix=prefix,
        tags=[tag],
        route_class=StrictRoute,
        default_response_class=ResourceResponse,
        generate_unique_id_function=attrgetter("name"),
    )


def _query_parameters(dependant: Dependant) -> Iterator[str]:
    """Yield the query parameters of a route and of its dependencies."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _query_parameters(dependency)


def _unknown(name: str, allowed: list[str]) -> dict[str, Any]:
    from zerolab.schema.section import suggest  # a server starts without configuration

    listing = f"; there are: {', '.join(allowed)}" if allowed else "; there are none"
    problem = f"unknown parameter{suggest(name, allowed) or listing}"
    return {"type": "value_error", "loc": ("query", name[:80]), "ctx": {"error": problem}}
