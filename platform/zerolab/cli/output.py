"""How commands speak: tables for people, JSON for programs, messages on standard error."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["duration", "number", "print_fields", "print_json", "print_table", "result", "say"]

_WIDE = 400
"""Characters in a line when nobody's terminal limits them."""


def result(text: str) -> None:
    """Print a result, for people or programs."""
    print(text)  # noqa: T201 - this is the place


def say(text: str) -> None:
    """Print a message that is no result."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is the place


def print_json(content: Any) -> None:
    """Print JSON as a result."""
    result(json.dumps(content, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table as a result; empty cells for None."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    console.print(table)


def print_fields(fields: Mapping[str, object]) -> None:
    """Print named values, one a line; those that are None or empty are left out."""
    shown = {name: value for name, value in fields.items() if value not in (None, "", [])}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        first, *more = str(value).splitlines() or [""]
        result(f"{name:<{width}}  {first}")
        for line in more:
            result(f"{'':<{width}}  {line}")


def number(value: object, digits: int = 4) -> str:
    """Write a metric in few digits; what is no number stays as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """Write a span of time in two units: ``1 h 12 min``, ``3 min 5 s``, ``40 s``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
