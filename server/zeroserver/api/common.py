"""Parameters and responses shared by many routes."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Path, Query
from pydantic import AfterValidator, BeforeValidator, Field

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
    "PagePath",
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
    """Parse an id of a path; None if it is invalid. An id has only one valid spelling."""
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
"""Integer of a query in canonical form: ``1``, not ``1.0`` or ``1_0``."""

IdPath = Annotated[int, BeforeValidator(_path_id), Path(ge=1, le=MAX_ID)]
Limit = Annotated[Whole, Query(ge=1, le=1000, description="Maximum number of rows of a page.")]
After = Annotated[str | None, Query(max_length=500, description="next_after of the previous page.")]
LineCursor = Annotated[
    Whole, Query(ge=0, le=MAX_ID, description="Only lines after the line with this id.")
]
Tail = Annotated[Whole | None, Query(ge=1, le=10_000, description="Only the last N lines.")]
Rank = Annotated[Whole | None, Query(ge=0, le=2**31 - 1)]
Where = Annotated[
    str | None,
    Query(max_length=20_000, description="Conditions: a JSON list of [column, operator, value]."),
]
Name = Annotated[str, AfterValidator(check_name)]
"""Name, label or pattern without control characters."""

PlainText = Annotated[str, AfterValidator(check_text)]
"""Text of several lines without other control characters."""

_PAGE_PATH = re.compile(r"/[A-Za-z0-9/,._-]*(\?[!-~]*)?")


def _page_path(text: str) -> str:
    if not _PAGE_PATH.fullmatch(text):
        example = "the part of a page address after #, such as /?state=ACTIVE"
        raise ValueError(f"must be {example}, got {text[:50]!r}")
    return text


PagePath = Annotated[str, Field(max_length=4000), AfterValidator(_page_path)]
"""Part of a page address after ``#``."""

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

_MEANINGS = {
    400: "Malformed request.",
    401: "No valid token.",
    403: "The token does not permit this request.",
    404: "Not found.",
    409: "The state does not allow it.",
    413: "Too large.",
    429: "Too many concurrent requests of this kind; try again.",
    422: "Invalid values; `problems` lists all of them.",
    503: "The database is not available; try again.",
}

FILE_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "The bytes of the file."}
}
"""Value of ``responses`` for a route that returns a file."""


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
                if status < "400" or "x-own" in item  # without FastAPI's own 422
            }
            operation["responses"] = errors | documented
