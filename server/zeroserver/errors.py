"""Mapping of errors to HTTP responses."""

import errno
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from zerolab.errors import (
    ConfigError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    StaleRunError,
    ZerolabError,
)
from zeroserver.protocols import protocol_of

__all__ = [
    "BusyError",
    "ExpiredTokenError",
    "StoreError",
    "TooLargeError",
    "UnauthorizedError",
    "bug_response",
    "error_response",
    "install_error_handlers",
]

logger = logging.getLogger(__name__)

_REMEDY = (
    "restore it from a backup, or move it away and recover its readable rows with "
    "`sqlite3 OLD .recover | sqlite3 zerolab.db`"
)


class StoreError(ZerolabError):
    """Failure to read from or write to the database."""

    disk_full = False
    damaged = False
    reason = ""
    """Message of the database."""

    @classmethod
    def of(cls, text: str) -> "StoreError":
        """Convert an error of the database driver."""
        full = any(word in text for word in ("disk is full", "disk full", "disk I/O", "No space"))
        instance = cls(
            f"the database cannot store data ({text}); free some space on its disk"
            if full
            else f"the database is not available ({text}); try again"
        )
        instance.disk_full, instance.reason = full, text
        return instance

    @classmethod
    def of_damage(cls, text: str) -> "StoreError":
        """Create the error for a damaged database."""
        instance = cls(f"the database is damaged ({text}); stop the server, and {_REMEDY}")
        instance.damaged, instance.reason = True, text
        return instance

    @classmethod
    def of_start(cls, location: str, cause: "StoreError", tables: Sequence[str] = ()) -> Self:
        """Create the error for a server that cannot start.

        Args:
            location: Address of the database.
            cause: Error of reading or writing.
            tables: Unreadable tables of a damaged database.
        """
        if cause.damaged:
            details = f"; what cannot be read: {', '.join(tables)}" if tables else ""
            instance = cls(f"database {location}: is damaged ({cause.reason}){details}; {_REMEDY}")
        else:
            instance = cls(f"database {location}: {cause}")
        instance.disk_full, instance.damaged, instance.reason = (
            cause.disk_full,
            cause.damaged,
            cause.reason,
        )
        return instance

    @classmethod
    def of_file(cls, error: OSError, path: Path) -> "StoreError":
        """Create the error for a file of the installation that cannot be written."""
        full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        remedy = "free some space on its disk" if full else "see that its directory can be written"
        instance = cls(f"{path}: cannot be written ({error.strerror or error}); {remedy}")
        instance.disk_full = full
        return instance


class TooLargeError(ZerolabError):
    """Error: a request is larger than this server accepts."""


class BusyError(ZerolabError):
    """Error: too many concurrent requests of a kind."""


class ExpiredTokenError(StaleRunError):
    """Error: the token belongs to a run that has ended."""


class UnauthorizedError(ForbiddenError):
    """Error: the token is missing or unknown."""


_TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    # The first matching class applies.
    (ExpiredTokenError, 401, "stale_run"),
    (ConfigError, 422, "config"),
    (NotFoundError, 404, "not_found"),
    (StaleRunError, 409, "stale_run"),
    (ConflictError, 409, "conflict"),
    (UnauthorizedError, 401, "unauthorized"),
    (ForbiddenError, 403, "forbidden"),
    (TooLargeError, 413, "too_large"),
    (BusyError, 429, "busy"),
    (StoreError, 503, "storage"),
    (ZerolabError, 400, "invalid"),
)

_HINTS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "5"}}
_TYPES = {400: "invalid", 401: "unauthorized", 404: "not_found", 405: "method", 413: "too_large"}


def error_response(error: Exception, path: str = "") -> JSONResponse:
    """Return the response for an error of the project or a disconnected client.

    Args:
        error: The error.
        path: Path of the request, which selects the protocol of the response.
    """
    if isinstance(error, ClientDisconnect):
        text = "the client disconnected in the middle of its request"
        return _answer(400, "invalid", text, [], path=path)
    for kind, status, name in _TABLE:
        if isinstance(error, kind):
            problems = error.problems if isinstance(error, ConfigError) else []
            if isinstance(error, StoreError):
                code = 507 if error.disk_full else status
                return _answer(code, name, str(error), problems, {"Retry-After": "2"}, path=path)
            headers = _HINTS.get(status)
            return _answer(status, name, str(error), problems, headers, path=path)
    raise error


def bug_response(scope: Mapping[str, Any], error: Exception) -> JSONResponse:
    """Log an unexpected error and return the response for it."""
    logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    text = "internal error; the log of the server has the details"
    return _answer(500, "internal", text, [], path=scope["path"])


def _answer(
    status: int,
    kind: str,
    message: str,
    problems: list[str],
    headers: dict[str, str] | None = None,
    *,
    path: str,
) -> JSONResponse:
    body: dict[str, Any] = {"error": {"type": kind, "message": message, "problems": problems}}
    if (protocol := protocol_of(path)) is not None:
        body = protocol.error(status, kind, message)
    return JSONResponse(body, status, headers)


def _key_path(location: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in location[1:]) or str(location[0])


def _requirement(error: Mapping[str, Any]) -> str:
    """Format a validation problem as "must be A, got B"."""
    if error["type"] == "missing":
        return "is required, got nothing"
    if error["type"] == "extra_forbidden":
        return "unknown key"
    if error["type"] == "value_error":  # an error of our validators, complete
        return str(error["ctx"]["error"])
    from zerolab.contract.secret_text import is_secret_name  # startup does not need it
    from zerolab.schema.section import requirement

    text = requirement(error)
    return text.partition(", got ")[0] if is_secret_name(str(error["loc"][-1])) else text


def _missing(request: Request) -> list[str]:
    """Return messages about removed extensions that may have had the requested route."""
    return list(getattr(request.app.state, "missing", ()))


def install_error_handlers(app: FastAPI) -> None:
    """Register handlers that convert all errors of ``app`` to the common response format."""

    @app.exception_handler(ZerolabError)
    async def _ours(request: Request, error: Exception) -> JSONResponse:
        return error_response(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        problems = [f"{_key_path(item['loc'])}: {_requirement(item)}" for item in error.errors()]
        if any(item["loc"][0] == "path" for item in error.errors()):
            problems += _missing(request)
        text = "request: " + "; ".join(problems)
        return _answer(422, "invalid", text, problems, path=request.url.path)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        kind = _TYPES.get(error.status_code, "invalid")
        headers = dict(error.headers) if error.headers else None
        missing = _missing(request) if error.status_code == 404 else ()
        text = "; ".join([str(error.detail), *missing])
        return _answer(error.status_code, kind, text, [], headers, path=request.url.path)

    @app.exception_handler(ClientDisconnect)
    async def _disconnected(request: Request, error: Exception) -> JSONResponse:
        return error_response(error, request.url.path)

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        return bug_response(request.scope, error)
