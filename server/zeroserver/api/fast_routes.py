"""Dispatch of the routes of runs and agents, which are called most, past the layers of FastAPI.

FastAPI's and Starlette's layers cost more than storing a report. The same routes are in the router
too: a request that does not match here, such as one with a wrong method, is answered there.
"""

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from zerolab.errors import ZerolabError
from zeroserver.api.runs import WireRoute
from zeroserver.errors import error_response

__all__ = ["FastRoutes"]

_Handler = Callable[[Request], Awaitable[Response]]


class FastRoutes:
    """ASGI layer, behind the guard, that calls the handlers of some routes itself.

    Args:
        app: Answers every other request.
        routes: Those of the form ``/THINGS/{id}/NAME`` are called here.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[WireRoute]) -> None:
        self._app = app
        self._handlers: dict[tuple[str, str, str], tuple[str, _Handler]] = {}
        for route in routes:
            parts = route.path.split("/")
            if len(parts) == 4 and parts[2].startswith("{"):
                handler = (parts[2][1:-1], route.handler)
                self._handlers[route.method, f"/api/v1/{parts[1]}", parts[3]] = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of one of the routes; pass any other one on."""
        if scope["type"] == "http" and not scope.get("root_path"):
            things, _, name = scope["path"].rpartition("/")
            things, _, number = things.rpartition("/")
            found = self._handlers.get((scope["method"], things, name))
            if found is not None and number:
                scope["path_params"] = {found[0]: number}
                await self._answer(found[1], scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _answer(self, handler: _Handler, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await handler(Request(scope, receive))
        except (ZerolabError, ClientDisconnect) as error:
            response = error_response(error)
        await response(scope, receive, send)
