"""Which trials are wanted, and in which order: by any column, hyperparameters too.

The order of a column: numbers, then texts, then what has no value, whichever way it is sorted;
the id breaks ties. A place in it is the value and the id of a trial, so that pages follow each
other while trials are added.
"""

import heapq
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from zerolab.errors import ConfigError
from zeroserver.analysis.columns import (
    Row,
    Value,
    cell_of,
    check_column,
    is_column,
    names,
    refuse,
)

__all__ = [
    "Choice",
    "Condition",
    "Place",
    "check_columns",
    "choose",
    "conditions",
    "holds_for",
    "kept",
    "place_of",
    "read_cursor",
    "read_place",
    "write_cursor",
]

_MOST_CONDITIONS = 100
_TEXT = 200
"""Characters of a text that count for its place in an order: a cursor holds no more."""

Condition = tuple[str, str, Any]
"""Column, operator and value."""

_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OPERATORS = ("=", "!=", *_COMPARED, "in", "contains")


def conditions(text: str | None) -> list[Condition]:
    """Read conditions: a JSON list of ``[column, operator, value]``.

    Raises:
        ConfigError: If it is none.
    """
    if text is None:
        return []
    try:
        found = msgspec.json.decode(text, type=list[tuple[str, str, Any]])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        form = '[["hparams.lr", ">=", 0.01], ["state", "in", ["COMPLETED", "RUNNING"]]]'
        problem = f"where: must be a JSON list such as {form}, got {text[:200]!r} ({error})"
        raise ConfigError("request", [problem]) from None
    if len(found) > _MOST_CONDITIONS:
        problem = f"where: must have at most {_MOST_CONDITIONS} conditions, got {len(found)}"
        raise ConfigError("request", [problem])
    refuse([_wrong(*each) for each in found])
    return found


def _wrong(column: str, sign: str, value: Any) -> str | None:
    if sign not in _OPERATORS:
        return f"where: operators are {', '.join(_OPERATORS)}, got {sign[:50]!r}"
    if sign == "in" and not isinstance(value, list):
        return f"where: 'in' needs a list, got {value!r}"[:300]
    if sign in _COMPARED and (isinstance(value, bool) or not isinstance(value, int | float | str)):
        return f"where: {sign!r} needs a number or a text, got {value!r} for {column!r}"[:300]
    if sign == "contains" and not isinstance(value, str):
        return f"where: 'contains' needs a text, got {value!r}"[:300]
    return None


@dataclass(frozen=True)
class Choice:
    """Some trials, in an order."""

    ids: list[int]
    """Of the page."""
    total: int
    """How many there are on all pages."""
    next_after: str | None
    """Cursor of the next page."""


def choose(
    rows: Sequence[Row], where: Sequence[Condition], sort: str, after: str | None, limit: int
) -> Choice:
    """Choose trials.

    Args:
        rows: All trials of an experiment.
        where: Conditions that all must hold.
        sort: A column; ``-`` before it for the largest first.
        after: Cursor that the page before gave.
        limit: Most trials of a page.

    Raises:
        ConfigError: If a column does not exist, or the cursor is none.
    """
    column = sort.removeprefix("-")
    check_columns(rows, where, [column], "sort")
    holds = kept(rows, where)
    sign = -1 if sort.startswith("-") else 1
    cell = cell_of(column)
    keyed = [(place_of(cell(row), _number(row), sign), row) for row in holds]
    if after is not None:
        place = read_place(after, sign)
        keyed = [each for each in keyed if each[0] > place]
    page = heapq.nsmallest(limit, keyed, key=operator.itemgetter(0))
    cursor = None
    if len(keyed) > limit:
        last = page[-1][1]
        cursor = write_cursor(cell(last), _number(last))
    return Choice([_number(row) for _, row in page], len(holds), cursor)


def kept(rows: Sequence[Row], where: Sequence[Condition]) -> list[Row]:
    """Return the trials for which all conditions hold."""
    found = list(rows)
    for column, sign, wanted in where:
        cell, holds = cell_of(column), holds_for(sign, wanted)
        found = [row for row in found if holds(cell(row))]
    return found


def check_columns(
    rows: Sequence[Row], where: Sequence[Condition], others: Sequence[str], what: str
) -> None:
    """Refuse columns that do not exist.

    Args:
        rows: All trials of an experiment.
        where: Conditions.
        others: Further columns.
        what: The parameter that gave those.

    Raises:
        ConfigError: With all that do not exist.
    """
    asked = [*((each, what) for each in others), *((one[0], "where") for one in where)]
    wrong = [each for each in asked if not is_column(each[0], rows)]
    known = names(rows) if wrong else []
    refuse([check_column(column, known, place) for column, place in wrong])


def _number(row: Row) -> int:
    return int(row.values["id"] or 0)


class _Infinite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    infinite: bool


_Cell = _Infinite | float | int | str | bool | None
_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Falling(str):
    """Text that is sorted the other way round."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return str.__gt__(self, other)

    def __gt__(self, other: str) -> bool:
        return str.__lt__(self, other)


Key = tuple[int, float, str]
"""Numbers before texts before nothing; the number, the text."""

Place = tuple[Key, int]
"""Of a trial in an order: of its value, then of its id."""


def place_of(value: Value, trial_id: int, sign: int) -> Place:
    """Return where a trial stands; ``sign`` is -1 for the largest first."""
    return _key(value, sign), sign * trial_id


def _key(value: Value, sign: int) -> Key:
    """Where a value stands in the order; ``sign`` is -1 for the largest first."""
    if isinstance(value, int | float):
        return 0, sign * float(value), ""
    if value is None:
        return 2, 0.0, ""
    return 1, 0.0, _Falling(value[:_TEXT]) if sign < 0 else value[:_TEXT]


def write_cursor(value: Value, trial_id: int) -> str:
    """Write a place in an order of trials; infinities have no place in JSON, and texts are cut."""
    cell: Any = value[:_TEXT] if isinstance(value, str) else value
    if isinstance(value, float) and math.isinf(value):
        cell = {"infinite": value > 0}
    return msgspec.json.encode([cell, trial_id]).decode()


def read_cursor(text: str) -> tuple[Value, int]:
    """Read what :func:`write_cursor` has written.

    Raises:
        ConfigError: If it has not.
    """
    try:
        value, row_id = msgspec.json.decode(text, type=tuple[_Cell, _Id])
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        problem = f"after: must be the next_after of the page before, got {text[:100]!r}"
        raise ConfigError("request", [problem]) from None
    if isinstance(value, _Infinite):
        value = math.inf if value.infinite else -math.inf
    return value, row_id


def read_place(after: str, sign: int) -> Place:
    """Read the place that a cursor tells.

    Raises:
        ConfigError: If it is none.
    """
    value, trial_id = read_cursor(after)
    return place_of(value, trial_id, sign)


def holds_for(sign: str, wanted: Any) -> Callable[[Value], bool]:
    """Make what says whether a condition holds for a value: once, for thousands of trials.

    Args:
        sign: Operator.
        wanted: What values are compared with.
    """
    if sign == "=":
        return lambda value: _same(value, wanted)
    if sign == "!=":
        return lambda value: not _same(value, wanted)
    if sign == "in":
        return lambda value: any(_same(value, each) for each in wanted)
    if sign == "contains":
        part = wanted.lower()
        return lambda value: value is not None and part in str(value).lower()
    compare, text = _COMPARED[sign], isinstance(wanted, str)
    return lambda value: (
        value is not None and isinstance(value, str) == text and compare(value, wanted)
    )


def _same(value: Value, wanted: Any) -> bool:
    """Whether two values are equal; true is not 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)
