"""From a row of a table to a resource: one rule for each type of a field, none for a field.

A resource is declared once, as a struct in :mod:`zeroserver.api.resources`. A field that is named
like a column is read from it; what else a resource tells is handed to :meth:`Resource.of`.
"""

import types
import typing
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, Literal, Self

import msgspec
from fastapi import Response
from msgspec import Meta
from sqlalchemy import RowMapping

from zerolab.contract.wire import wire_number

__all__ = ["Num", "Resource", "Share", "Time", "iso", "respond"]


def iso(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 in UTC, ending in Z; times that no calendar has as None."""
    if seconds is None:
        return None
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _raw(text: str) -> msgspec.Raw:
    """Put JSON from the database into an answer as it is."""
    return msgspec.Raw(text.encode())


Num = Annotated[
    float | Literal["NaN", "Infinity", "-Infinity"],
    Meta(title="Num", extra={"read": wire_number}),
]
"""JSON has no number that is not finite; those travel as text."""

Time = Annotated[str, Meta(extra={"read": iso})]
"""ISO 8601 in UTC; seconds since 1970 in the tables."""

Share = Annotated[float, Meta(ge=0, le=1)]
"""0 to 1."""


class Resource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all that the REST API answers."""

    @classmethod
    def of(cls, row: RowMapping, **more: Any) -> Self:
        """Read a row of the table.

        Args:
            row: With a column for every field that is not in ``more``.
            **more: Fields that no column has.
        """
        values = []
        for name, read in _readers(cls):
            value = more[name] if name in more else row[name]
            values.append(value if read is None or value is None or name in more else read(value))
        return cls(*values)


Reader = Callable[[Any], Any]


@cache
def _readers(cls: type[Resource]) -> tuple[tuple[str, Reader | None], ...]:
    """Name of each field, and what turns a column's value into the field's."""
    return tuple((each.name, _reader(each.type)) for each in msgspec.structs.fields(cls))


def _reader(annotation: Any) -> Reader | None:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return next(filter(None, map(_reader, parts)), None)
    if origin is Annotated:
        extras = (part.extra or {} for part in parts[1:] if isinstance(part, Meta))
        return next((extra["read"] for extra in extras if "read" in extra), None)
    if origin in (dict, list):
        return _raw
    return bool if annotation is bool else None


def respond(content: msgspec.Struct, status: int = 200) -> Response:
    """Answer with a resource; tests check that it fits the type, nothing reads it again."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
