"""Parsers of a server's responses: resources, events and errors."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import msgspec

from zerolab.errors import (
    ConfigError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    StaleRunError,
    UnreachableError,
    ZerolabError,
)

__all__ = ["Event", "Json", "error_of", "parse_events", "resource"]

Json = dict[str, Any]

_BUSY_STATUS = {408, 429, 502, 503, 504, 507}


class Event(NamedTuple):
    """One message of a server's event stream."""

    id: str
    """Cursor: pass it as ``after`` to continue after this event."""
    name: str
    data: Json


def resource(response: Json, key: str) -> Json:
    """Unwrap ``{"experiment": {...}}``, with its ``warnings``."""
    inner = response.get(key)
    if not isinstance(inner, dict):
        return response
    return inner | {"warnings": response["warnings"]} if response.get("warnings") else inner


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Read the event-stream format: fields until an empty line, comments skipped."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in fields:
                data = msgspec.json.decode(fields["data"])
                yield Event(fields.get("id", ""), fields.get("event", "message"), data)
            fields = {}
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data" and "data" in fields:
            value = f"{fields['data']}\n{value}"
        if name:
            fields[name] = value


def error_of(response: httpx.Response, url: str) -> ZerolabError:
    """Convert a response with status 400 or above to an exception."""
    status = response.status_code
    try:
        body = response.json()["error"]
        kind, message = str(body.get("type", "")), str(body["message"])
        problems = [str(problem) for problem in body.get("problems") or ()]
    except (ValueError, KeyError, TypeError, AttributeError):
        kind, problems = "", []
        text = " ".join(response.text.split())[:500]  # perhaps the page of another server
        message = f"{response.request.method} {response.request.url.path}: {text}"
    error: ZerolabError
    if kind == "stale_run":  # also with status 401, for an expired token
        error = StaleRunError(message)
    elif status in {401, 403}:
        error = ForbiddenError(
            f"{url}: {message}; the token comes from ZEROLAB_TOKEN, or from the file `token` of "
            "the server's data directory"
        )
    elif status in _BUSY_STATUS or kind == "unreachable":
        error = UnreachableError(f"{url}: the server cannot take this now ({status}): {message}")
    elif kind == "not_found":
        error = NotFoundError(message)
    elif status == 409:
        error = ConflictError(message)
    elif kind and status < 500:
        source, counted, _ = message.partition(f": {len(problems)} problem(s)\n")
        error = ConfigError(source if counted else "request", problems or [message])
    elif kind:
        error = ZerolabError(f"{url}: the server failed ({status}): {message}; see its log")
    else:
        error = UnreachableError(f"{url}: not a Zerolab server ({status}): {message}")
    return error
