"""Routes that read: one thread for all of a request, in place of one for each of its parts."""

import inspect
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any

from fastapi.routing import APIRoute

from zeroserver.services import ReadDep, Services, ServicesDep

__all__ = ["ReadingRoute"]

_SERVICES = "reading_services"
"""Parameter of a route that was made here; no route has one of that name itself."""


class ReadingRoute(APIRoute):
    """A route whose function may ask for a connection with :data:`ReadDep`.

    FastAPI would go to a thread for the connection, to another one for the function, and to a
    third to give the connection back: half of what a small answer costs.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        options["generate_unique_id_function"] = attrgetter("name")
        super().__init__(path, _on_one_thread(endpoint), **options)


def _on_one_thread(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(endpoint)
    wanted = [each.name for each in signature.parameters.values() if each.annotation is ReadDep]
    if not wanted or inspect.iscoroutinefunction(endpoint):
        return endpoint
    (connection_name,) = wanted

    @wraps(endpoint)
    async def route(**values: Any) -> Any:
        services: Services = values.pop(_SERVICES)
        return await services.read(
            lambda connection: endpoint(**values, **{connection_name: connection})
        )

    others = [each for name, each in signature.parameters.items() if name != connection_name]
    asked = inspect.Parameter(_SERVICES, inspect.Parameter.KEYWORD_ONLY, annotation=ServicesDep)
    parts = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in others]
    route.__signature__ = signature.replace(parameters=[*parts, asked])  # type: ignore[attr-defined]
    del route.__wrapped__
    return route
