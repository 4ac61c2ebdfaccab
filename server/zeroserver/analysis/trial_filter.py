"""Filter, sort and paginate trials by any column, including hyperparameters.

Numbers come first, then texts, then missing values, in both directions; the id breaks ties. A
cursor contains the value and the id of a trial, so that pages stay consistent while trials are
added.
"""

import heapq
import math
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from zerolab.errors import ConfigError
from zeroserver.analysis.columns import (
    Row,
    Value,
    cell_reader,
    check_column,
    is_column,
    names,
    raise_problems,
)

__all__ = [
    "Condition",
    "SelectedPage",
    "SortPosition",
    "check_columns",
    "choose",
    "condition_matcher",
    "conditions",
    "cursor_position",
    "matching_rows",
    "read_cursor",
    "sort_position",
    "write_cursor",
]

_MAX_CONDITIONS = 100
_MAX_TEXT = 200
"""Maximum number of characters compared when sorting, and stored in a cursor."""

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
    """Parse conditions: a JSON list of ``[column, operator, value]``.

    Raises:
        ConfigError: If the text is not such a list.
    """
    if text is None:
        return []
    try:
        parsed = msgspec.json.decode(text, type=list[tuple[str, str, Any]])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        form = '[["hparams.lr", ">=", 0.01], ["state", "in", ["COMPLETED", "RUNNING"]]]'
        problem = f"where: must be a JSON list such as {form}, got {text[:200]!r} ({error})"
        raise ConfigError("request", [problem]) from None
    if len(parsed) > _MAX_CONDITIONS:
        problem = f"where: must have at most {_MAX_CONDITIONS} conditions, got {len(parsed)}"
        raise ConfigError("request", [problem])
    raise_problems([_problem(*condition) for condition in parsed])
    return parsed


def _problem(column: str, sign: str, value: Any) -> str | None:
    if sign not in _OPERATORS:
        return f"where: operators are {', '.join(_OPERATORS)}, got {sign[:50]!r}"
    if sign == "in" and not isinstance(value, list):
        return f"where: 'in' needs a list, got {value!r}"[:300]
    if sign in _COMPARED and (isinstance(value, bool) or not isinstance(value, int | float | str)):
        return f"where: {sign!r} needs a number or a text, got {value!r} for {column!r}"[:300]
    if sign == "contains" and not isinstance(value, str):
        return f"where: 'contains' needs a text, got {value!r}"[:300]
    return None


class SelectedPage(msgspec.Struct, frozen=True):
    """Trials of one page, in order."""

    ids: list[int]
    """Ids of the trials."""
    total: int
    """Number of trials on all pages."""
    next_after: str | None
    """Cursor of the next page."""


def choose(
    rows: Sequence[Row], conditions: Sequence[Condition], sort: str, after: str | None, limit: int
) -> SelectedPage:
    """Filter and sort trials; return one page.

    Args:
        rows: All trials of an experiment.
        conditions: Conditions that all must hold.
        sort: Column to sort by; a leading ``-`` sorts in descending order.
        after: Cursor from the previous page.
        limit: Maximum number of trials of a page.

    Raises:
        ConfigError: If a column does not exist, or the cursor is invalid.
    """
    column = sort.removeprefix("-")
    check_columns(rows, conditions, [column], "sort")
    matching = matching_rows(rows, conditions)
    sign = -1 if sort.startswith("-") else 1
    cell = cell_reader(column)
    keyed = [(sort_position(cell(row), _number(row), sign), row) for row in matching]
    if after is not None:
        position = cursor_position(after, sign)
        keyed = [entry for entry in keyed if entry[0] > position]
    page = heapq.nsmallest(limit, keyed, key=operator.itemgetter(0))
    cursor = None
    if len(keyed) > limit:
        last = page[-1][1]
        cursor = write_cursor(cell(last), _number(last))
    return SelectedPage([_number(row) for _, row in page], len(matching), cursor)


def matching_rows(rows: Sequence[Row], conditions: Sequence[Condition]) -> list[Row]:
    """Return the trials for which all conditions hold."""
    matching = list(rows)
    for column, sign, operand in conditions:
        cell, matches = cell_reader(column), condition_matcher(sign, operand)
        matching = [row for row in matching if matches(cell(row))]
    return matching


def check_columns(
    rows: Sequence[Row], conditions: Sequence[Condition], columns: Sequence[str], what: str
) -> None:
    """Raise if a column does not exist.

    Args:
        rows: All trials of an experiment.
        conditions: Conditions whose columns are checked.
        columns: Other columns to check.
        what: Request parameter that named the other columns.

    Raises:
        ConfigError: Lists all columns that do not exist.
    """
    requested = [
        *((name, what) for name in columns),
        *((condition[0], "where") for condition in conditions),
    ]
    unknown = [name for name in requested if not is_column(name[0], rows)]
    hparam_names = names(rows) if unknown else []
    raise_problems([check_column(column, hparam_names, parameter) for column, parameter in unknown])


def _number(row: Row) -> int:
    return int(row.values["id"] or 0)


class _Infinite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    infinite: bool


_Cell = _Infinite | float | int | str | bool | None
_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _DescendingText(str):
    """Text that is sorted in descending order."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return str.__gt__(self, other)

    def __gt__(self, other: str) -> bool:
        return str.__lt__(self, other)


Key = tuple[int, float, str]
"""Group (0 number, 1 text, 2 missing), number, text."""

SortPosition = tuple[Key, int]
"""Sort key of a trial: key of its value, then its id."""


def sort_position(value: Value, trial_id: int, sign: int) -> SortPosition:
    """Return the sort key of a trial; ``sign`` is -1 for descending order."""
    return _key(value, sign), sign * trial_id


def _key(value: Value, sign: int) -> Key:
    """Return the sort key of a value; ``sign`` is -1 for descending order."""
    if isinstance(value, int | float):
        return 0, sign * float(value), ""
    if value is None:
        return 2, 0.0, ""
    return 1, 0.0, _DescendingText(value[:_MAX_TEXT]) if sign < 0 else value[:_MAX_TEXT]


def write_cursor(value: Value, trial_id: int) -> str:
    """Encode a cursor; truncate texts and represent infinities as objects."""
    cell: Any = value[:_MAX_TEXT] if isinstance(value, str) else value
    if isinstance(value, float) and math.isinf(value):
        cell = {"infinite": value > 0}
    return msgspec.json.encode([cell, trial_id]).decode()


def read_cursor(text: str) -> tuple[Value, int]:
    """Decode a cursor of :func:`write_cursor`.

    Raises:
        ConfigError: If the cursor is invalid.
    """
    try:
        value, row_id = msgspec.json.decode(text, type=tuple[_Cell, _Id])
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        problem = f"after: must be the next_after of the page before, got {text[:100]!r}"
        raise ConfigError("request", [problem]) from None
    if isinstance(value, _Infinite):
        value = math.inf if value.infinite else -math.inf
    return value, row_id


def cursor_position(after: str, sign: int) -> SortPosition:
    """Return the sort key of a cursor.

    Raises:
        ConfigError: If the cursor is invalid.
    """
    value, trial_id = read_cursor(after)
    return sort_position(value, trial_id, sign)


def condition_matcher(sign: str, operand: Any) -> Callable[[Value], bool]:
    """Return a function that checks a condition, for use with many values.

    Args:
        sign: Operator.
        operand: Value to compare with.
    """
    if sign == "=":
        return lambda value: _equal(value, operand)
    if sign == "!=":
        return lambda value: not _equal(value, operand)
    if sign == "in":
        return lambda value: any(_equal(value, item) for item in operand)
    if sign == "contains":
        part = operand.lower()
        return lambda value: value is not None and part in str(value).lower()
    compare, text = _COMPARED[sign], isinstance(operand, str)
    return lambda value: (
        value is not None and isinstance(value, str) == text and compare(value, operand)
    )


def _equal(value: Value, operand: Any) -> bool:
    """Compare two values; true does not equal 1."""
    return isinstance(value, bool) == isinstance(operand, bool) and bool(value == operand)
