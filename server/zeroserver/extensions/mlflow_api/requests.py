"""Requests and responses in MLflow's conventions: fields, errors, access and routes."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from zerolab.contract.media import MAX_MEDIA_BYTES
from zerolab.errors import ConfigError, ForbiddenError, NotFoundError
from zeroserver.access.principal import Principal, principal_of
from zeroserver.access.routes import ACCESS, Access, Caller, Role
from zeroserver.api.strict_route import StrictRoute
from zeroserver.protocols import PROTOCOLS, Protocol
from zeroserver.services import Services, services_of

__all__ = [
    "API",
    "ARTIFACTS",
    "PREFIX",
    "Call",
    "Handler",
    "MlflowRoute",
    "add_route",
    "error_answer",
    "missing",
]

PREFIX = "/mlflow/"
API = f"{PREFIX}api/2.0/mlflow/"
ARTIFACTS = f"{PREFIX}api/2.0/mlflow-artifacts/artifacts"

_CALLERS = frozenset[Caller]({"user"})
_CODES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    405: "ENDPOINT_NOT_FOUND",
    409: "INVALID_STATE",
    429: "REQUEST_LIMIT_EXCEEDED",
    500: "INTERNAL_ERROR",
    503: "TEMPORARILY_UNAVAILABLE",
    507: "TEMPORARILY_UNAVAILABLE",
}
_NO_ROUTE = "Not Found"
"""Message of the framework for an unknown path."""


def _error(status: int, _kind: str, message: str) -> dict[str, Any]:
    """Return the body of an error, as MLflow's clients show it."""
    code = _CODES.get(status, "INVALID_PARAMETER_VALUE")
    if status in {404, 405} and message.startswith((_NO_ROUTE, "Method Not Allowed")):
        code, message = "ENDPOINT_NOT_FOUND", "this server does not support this call of MLflow"
    return {"error_code": code, "message": message}


PROTOCOLS[PREFIX] = Protocol(_error, f"{ARTIFACTS}/", MAX_MEDIA_BYTES)


def error_answer(status: int, code: str, message: str) -> JSONResponse:
    """Return a response with an error code of MLflow."""
    return JSONResponse({"error_code": code, "message": message}, status)


class MlflowRoute(StrictRoute):
    """Route that ignores unknown query parameters, as newer clients send more of them."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Return the handler of requests."""
        return APIRoute.get_route_handler(self)


class Call:
    """Request of a client: its fields, and the services that it needs.

    Args:
        services: Services of the server.
        principal: The caller.
        values: Fields of the query, the body and the path.
    """

    def __init__(self, services: Services, principal: Principal, values: dict[str, Any]) -> None:
        self.services = services
        self.principal = principal
        self._values = values

    def text(self, name: str, default: str = "") -> str:
        """Return a text; numbers are accepted, since ids are numbers here.

        Raises:
            ConfigError: If it is neither.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise _invalid(name, "a text", value)
        return str(value)

    def required(self, name: str, *others: str) -> str:
        """Return a text that must not be empty; ``others`` are older names of the field.

        Raises:
            ConfigError: If it is missing.
        """
        for field in (name, *others):
            if text := self.text(field):
                return text
        message = f"Missing value for required parameter '{name}'"
        raise ConfigError("request", [message])

    def whole(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number; protobuf's JSON writes those of 64 bits as texts.

        Raises:
            ConfigError: If it is none, or has more than 63 bits.
        """
        value = self._values.get(name)
        if value is None or value == "":
            return default
        try:
            number = int(value) if not isinstance(value, bool) else None
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or abs(number) >= 2**63 or number != float(value):
            raise _invalid(name, "a whole number", value)
        return number

    def number(self, name: str) -> float:
        """Return a number; NaN and infinities are texts in JSON.

        Raises:
            ConfigError: If it is none.
        """
        value = self._values.get(name)
        try:
            if isinstance(value, bool) or value is None:
                raise TypeError
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise _invalid(name, "a number", value) from None

    def listed(self, name: str, limit: int) -> list[Any]:
        """Return a list.

        Raises:
            ConfigError: If it is none, or too long.
        """
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise _invalid(name, "a list", value)
        if len(value) > limit:
            raise ConfigError("request", [f"{name}: must have at most {limit}, got {len(value)}"])
        return value

    def parts(self, name: str, limit: int) -> "list[Call]":
        """Return a list of objects, each with fields.

        Raises:
            ConfigError: If it is none, or too long.
        """
        items = self.listed(name, limit)
        for item in items:
            if not isinstance(item, dict):
                raise _invalid(name, "a list of objects", item)
        return [Call(self.services, self.principal, item) for item in items]

    async def check_owner(self, owner_id: int, resource: str) -> None:
        """Check that the caller owns a resource or is an administrator.

        Raises:
            ForbiddenError: If not.
        """
        if owner_id != self.principal.user_id and not self.principal.is_admin:
            owner = self.services.orchestrator.users.name_of(owner_id)
            msg = f"{resource} belongs to {owner}; only {owner} or an administrator may change it"
            raise ForbiddenError(msg)


def _invalid(name: str, condition: str, value: Any) -> ConfigError:
    return ConfigError("request", [f"{name}: must be {condition}, got {str(value)[:100]!r}"])


Handler = Callable[[Call], Awaitable[dict[str, Any] | Response]]


def add_route(
    router: Any, route: str, handler: Handler, role: Role, *, audited: bool = False
) -> None:
    """Add a route of the API, and declare who may call it.

    Args:
        router: Router of the extension.
        route: Method, and path below :data:`API`.
        handler: Function that processes a request.
        role: Least role of the caller.
        audited: Whether a call is in the audit log.
    """
    method, _, path = route.partition(" ")
    ACCESS[f"{method} {API}{path}"] = Access(_CALLERS, role, audited=audited)

    async def endpoint(request: Request) -> Response:
        call = Call(services_of(request), principal_of(request), await _fields(request))
        answer = await handler(call)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    endpoint.__module__ = handler.__module__
    router.add_api_route(f"{API}{path}", endpoint, methods=[method], include_in_schema=False)


async def _fields(request: Request) -> dict[str, Any]:
    fields: dict[str, Any] = dict(request.query_params)
    content = await request.body() if request.method != "GET" else b""
    if content:
        try:
            body = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ConfigError("request", [f"body: must be JSON ({error})"]) from None
        if not isinstance(body, dict):
            raise ConfigError("request", ["body: must be an object"])
        fields |= body
    return fields | request.path_params


def missing(kind: str, key: str) -> NotFoundError:
    """Return the error of a missing resource."""
    return NotFoundError(f"{kind} with id={key[:100]} does not exist")
