"""From a row of a table to a resource: one rule for each type of a field, none for a field.

A resource is declared once, as a struct in :mod:`zeroserver.api.resources`. A field that is named
like a column is read from it; what else a resource tells is handed to :meth:`Resource.of`.
"""

import types
import typing
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache, lru_cache
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
from fastapi import Response
from msgspec import Meta
from sqlalchemy import RowMapping

from zerolab.contract.messages import wire_number

__all__ = ["Name", "Num", "Resource", "Share", "Time", "iso", "respond"]


@lru_cache(maxsize=4096)  # a list is read again and again, and its times stay
def iso(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 in UTC, ending in Z; times that no calendar has as None."""
    if seconds is None:
        return None
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds")[:-6] + "Z"  # in place of +00:00


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

Name = Annotated[str, Meta(extra={"read": lambda text: text or None})]
"""A name that is empty in its table where there is none; null in an answer."""

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
        plan = _plan(cls, tuple(more))
        values = list(plan.columns(row))
        for place, read in plan.readers:
            value = values[place]
            if value is not None:
                values[place] = read(value)
        for place, name in plan.given:
            values[place] = more[name]
        return cls(*values)


Reader = Callable[[Any], Any]


class _Plan(NamedTuple):
    """How a row becomes a resource; found out once, for lists make thousands of them."""

    columns: Callable[[RowMapping], tuple[Any, ...]]
    """Takes a column for every field, in their order; any one for a field that is given."""
    readers: tuple[tuple[int, Reader], ...]
    """Place of each field that is not as its column is, and what turns the one into the other."""
    given: tuple[tuple[int, str], ...]
    """Place and name of each field that no column has."""


@cache
def _plan(cls: type[Resource], given: tuple[str, ...]) -> _Plan:
    fields = msgspec.structs.fields(cls)
    read = [each for each in fields if each.name not in given]
    columns = (each.name if each.name not in given else read[0].name for each in fields)
    readers = ((at, _reader(each.type)) for at, each in enumerate(fields) if each in read)
    return _Plan(
        itemgetter(*columns),
        tuple((at, reader) for at, reader in readers if reader is not None),
        tuple((at, each.name) for at, each in enumerate(fields) if each.name in given),
    )


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
