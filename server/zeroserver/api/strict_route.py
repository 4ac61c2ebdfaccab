"""Router that rejects unknown query parameters and JSON that is not strict."""

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
    """Request whose JSON body must be strict; Python's parser accepts NaN and lone surrogates."""

    async def json(self) -> Any:
        """Parse the body.

        Raises:
            HTTPException: If it is not valid JSON.
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

    The path is compiled by the first request that is compared with it. Parameters and response
    model are analyzed by the first request that matches, or for the OpenAPI document. Analyzing all
    routes would take an eighth of the server's startup.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Store FastAPI's arguments."""
        self.path, self.endpoint, self.methods = path, endpoint, set(options["methods"])
        self._options = options

    def __getattr__(self, name: str) -> Any:
        """Compile the path, or analyze parameters and response model, on first use."""
        if name in {"path_regex", "path_format", "param_convertors"}:
            self.path_regex, self.path_format, self.param_convertors = compile_path(self.path)
            return getattr(self, name)
        options = self.__dict__.pop("_options", None)
        if options is None:
            raise AttributeError(name)
        super().__init__(self.path, self.endpoint, **options)
        return getattr(self, name)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()
        allowed = sorted(_query_parameters(self.dependant))

        async def handle_strictly(request: Request) -> Response:
            if unknown := [name for name in request.query_params if name not in allowed]:
                raise RequestValidationError([_unknown(name, allowed) for name in unknown])
            # FastAPI stores its request attributes in the scope, so they are preserved.
            return await handle(_StrictRequest(request.scope, request.receive, request._send))  # noqa: SLF001 - FastAPI documents this way to a custom request

        return handle_strictly


def resource_router(prefix: str, tag: str) -> APIRouter:
    """Create a router of strict routes that may return resources.

    Args:
        prefix: Prefix of all paths.
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
    """Yield the query parameters of a route and its dependencies."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _query_parameters(dependency)


def _unknown(name: str, allowed: list[str]) -> dict[str, Any]:
    from zerolab.schema.section import suggest  # startup does not need it

    listing = f"; there are: {', '.join(allowed)}" if allowed else "; there are none"
    problem = f"unknown parameter{suggest(name, allowed) or listing}"
    return {"type": "value_error", "loc": ("query", name[:80]), "ctx": {"error": problem}}
