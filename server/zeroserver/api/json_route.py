"""Strict JSON bodies: valid Unicode and finite numbers only."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from fastapi import HTTPException, Request, Response
from pydantic import AfterValidator

from zerolab.contract.names import check_name, check_text
from zeroserver.api.api_route import ApiRoute

__all__ = ["JsonRoute", "Name", "PlainText"]


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


class JsonRoute(ApiRoute):
    """Route with a strictly parsed JSON body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        answer = super().get_route_handler()

        async def strict(request: Request) -> Response:
            # FastAPI's own request attributes live in the scope, so they are kept.
            return await answer(_StrictRequest(request.scope, request.receive, request._send))  # noqa: SLF001 - FastAPI's own way to a request of one's own

        return strict


Name = Annotated[str, AfterValidator(check_name)]
"""Name, label or pattern without control characters."""

PlainText = Annotated[str, AfterValidator(check_text)]
"""Text of several lines without other control characters."""
