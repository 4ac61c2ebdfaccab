"""Parameters and answers that many routes share."""

import re
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Path, Query
from pydantic import BeforeValidator

from zeroserver.api import resources
from zeroserver.api.rows import Resource

__all__ = [
    "FILE_ANSWER",
    "RESOURCES",
    "After",
    "IdPath",
    "Level",
    "Limit",
    "LineCursor",
    "Rank",
    "Tail",
    "Where",
    "Whole",
    "add_resources",
    "answer",
    "id_of",
    "schemas",
]

MAX_ID = 2**53

_ID = re.compile(r"[1-9][0-9]{0,15}")
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")


def id_of(text: str) -> int | None:
    """Read an id from a path; None if it is none. One id has one path."""
    number = int(text) if _ID.fullmatch(text) else 0
    return number if 0 < number <= MAX_ID else None


def _path_id(text: Any) -> Any:
    if isinstance(text, str) and id_of(text) is None:
        msg = f"must be an id, a whole number from 1 to 2^53, got {text[:50]!r}"
        raise ValueError(msg)
    return text


def _whole(text: Any) -> Any:
    if isinstance(text, str) and not _WHOLE.fullmatch(text):
        msg = f"must be a whole number, got {text[:50]!r}"
        raise ValueError(msg)
    return text


Whole = Annotated[int, BeforeValidator(_whole)]
"""A number in a query, in the one way to write it: ``1``, not ``1.0`` or ``1_0``."""

IdPath = Annotated[int, BeforeValidator(_path_id), Path(ge=1, le=MAX_ID)]
Limit = Annotated[Whole, Query(ge=1, le=1000, description="Most rows of a page.")]
After = Annotated[str | None, Query(max_length=500, description="next_after of the page before.")]
LineCursor = Annotated[Whole, Query(ge=0, le=MAX_ID, description="Lines after the one of this id.")]
Tail = Annotated[Whole | None, Query(ge=1, le=10_000, description="Only so many lines, the last.")]
Rank = Annotated[Whole | None, Query(ge=0, le=2**31 - 1)]
Where = Annotated[
    str | None,
    Query(max_length=20_000, description="Conditions: a JSON list of [column, operator, value]."),
]
Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

_MEANINGS = {
    400: "The request is not understood.",
    401: "No valid token.",
    403: "The token allows less than this.",
    404: "There is no such thing.",
    409: "Its state does not allow it.",
    413: "Too large.",
    429: "As many of these are going on as the server takes at a time; try again.",
    422: "Something in the request does not hold; `problems` lists all of it.",
    503: "The database cannot take it now; try again.",
}


RESOURCES: tuple[type[Resource], ...] = tuple(
    getattr(resources, name) for name in resources.__all__
)
"""All that a route may answer."""

FILE_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "The bytes of the file."}
}
"""For the ``responses`` of a route that answers with a file."""

_REFERENCE = "#/components/schemas/{name}"


def answer(kind: type[Resource], status: int = 200) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` of a route that responds with a resource.

    The routes encode structs themselves: pydantic would validate them again, which takes 5 ms for
    100 trials instead of 0.2 ms.
    """
    return {status: {"description": kind.__doc__, "content": _json(kind)}}


def _json(kind: type[Resource]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}


def schemas() -> dict[str, Any]:
    """Return the JSON schema of every resource, by its name."""
    return msgspec.json.schema_components(RESOURCES, ref_template=_REFERENCE)[1]


def add_resources(document: dict[str, Any]) -> None:
    """Add all resources and the common error responses to an OpenAPI document."""
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas())
    content = _json(resources.ErrorAnswer)
    errors = {
        str(status): {"description": text, "content": content} for status, text in _MEANINGS.items()
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            own_responses = {
                status: item
                for status, item in operation["responses"].items()
                if status < "400" or "x-own" in item  # not FastAPI's own 422
            }
            operation["responses"] = errors | own_responses
