"""Tables as JSON: names of columns, and rows of numbers, texts and null."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from zerolab.contract.messages import wire_number
from zerolab.errors import ConfigError
from zerolab.reports.media_files import MediaItem

__all__ = ["table_items"]

logger = logging.getLogger(__name__)

_MAX_ROWS = 10_000
_MAX_COLUMNS = 200
_MAX_TEXT = 10_000


def table_items(table: Any, columns: Sequence[str] | None = None) -> list[MediaItem]:
    """Return the item of a table.

    Raises:
        ConfigError: If it is none.
    """
    names, rows = _columns_and_rows(table, columns)
    if not 0 < len(names) <= _MAX_COLUMNS:
        raise ConfigError("table", [f"must have 1 to {_MAX_COLUMNS} columns, got {len(names)}"])
    width = next((len(row) for row in rows if len(row) != len(names)), None)
    if width is not None:
        problem = f"each row must have {len(names)} values, as there are columns, got {width}"
        raise ConfigError("table", [problem])
    if len(rows) > _MAX_ROWS:
        logger.warning("a table has %d rows: only the first %d are stored", len(rows), _MAX_ROWS)
    cells = [[_cell(value) for value in row] for row in rows[:_MAX_ROWS]]
    content = msgspec.json.encode({"columns": names, "rows": cells})
    metadata: dict[str, object] = {"rows": len(cells), "columns": len(names)}
    return [MediaItem("table", content, ".json", metadata)]


def _columns_and_rows(
    table: Any, columns: Sequence[str] | None
) -> tuple[list[str], Sequence[Sequence[Any]]]:
    if hasattr(table, "itertuples") and hasattr(table, "columns"):  # pandas
        return _names(table.columns), list(table.itertuples(index=False, name=None))
    if hasattr(table, "iter_rows") and hasattr(table, "columns"):  # polars
        return _names(table.columns), list(table.iter_rows())
    if isinstance(table, Mapping):
        lengths = {name: len(values) for name, values in table.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError("table", [f"columns: must have the same length, got {lengths}"])
        return _names(table), list(zip(*table.values(), strict=True))
    rows = table.tolist() if hasattr(table, "tolist") else table
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        problem = "must be a data frame, a list of rows or dicts, or a dict of columns"
        raise ConfigError("table", [f"{problem}, got {type(table).__name__}"])
    if rows and all(isinstance(row, Mapping) for row in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))
        return _names(names), [[row.get(name) for name in names] for row in rows]
    if columns is None:
        raise ConfigError("table", ["columns: must be the names of the columns, got None"])
    if not all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows):
        raise ConfigError("table", ["must be rows of values, or dicts only"])
    return _names(columns), rows


def _names(columns: Any) -> list[str]:
    return [str(name)[:_MAX_TEXT] for name in columns]


def _cell(value: Any) -> float | str | None:
    """Return a value that JSON can represent; others become text."""
    if value is None or isinstance(value, bool | str):
        return value[:_MAX_TEXT] if isinstance(value, str) else value
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy, torch
        value = value.item()
    if isinstance(value, int) and abs(value) < 2**53:
        return value
    return wire_number(value) if isinstance(value, float) else str(value)[:_MAX_TEXT]
