"""Parameters and responses that many routes share."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Path, Query
from pydantic import AfterValidator, BeforeValidator

from zerolab.contract.names import check_name, check_text
from zeroserver.api.resources import ErrorAnswer
from zeroserver.api.rows import REFERENCE, Resource

__all__ = [
    "FILE_ANSWER",
    "After",
    "IdPath",
    "Level",
    "Limit",
    "LineCursor",
    "Name",
    "PlainText",
    "Rank",
    "Tail",
    "Where",
    "Whole",
    "document_resources",
    "id_of",
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
Name = Annotated[str, AfterValidator(check_name)]
"""Name, label or pattern without control characters."""

PlainText = Annotated[str, AfterValidator(check_text)]
"""Text of several lines without other control characters."""

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

FILE_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "The bytes of the file."}
}
"""For the ``responses`` of a route that answers with a file."""


def document_resources(document: dict[str, Any], models: Iterable[Any]) -> None:
    """Add the schemas of response models and the common errors to an OpenAPI document."""
    types = (model for model in models if isinstance(model, type))
    resources = [ErrorAnswer, *(model for model in types if issubclass(model, Resource))]
    schemas = msgspec.json.schema_components(resources, ref_template=REFERENCE)[1]
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    schema = {"$ref": REFERENCE.format(name=ErrorAnswer.__name__)}
    errors = {
        str(status): {"description": text, "content": {"application/json": {"schema": schema}}}
        for status, text in _MEANINGS.items()
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            documented = {
                status: item
                for status, item in operation["responses"].items()
                if status < "400" or "x-own" in item  # not FastAPI's own 422
            }
            operation["responses"] = errors | documented
