"""Formatting for people: bytes, durations, shortened lists, and small tables."""

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["duration_text", "first_few", "html_table", "size_text"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(size: float) -> str:
    """Format a number of bytes, in units of 1000: ``512 B``, ``1.5 kB``, ``40.2 MB``.

    Args:
        size: In bytes.
    """
    for unit in _UNITS:
        # 999.96 would be written as 1000.0.
        if abs(size) < (1000 if unit == "B" else 999.95) or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:,.1f} {unit}"


def duration_text(seconds: float) -> str:
    """Format a duration in two units: ``1 h 12 min``, ``3 min 5 s``, ``40 s``.

    Args:
        seconds: The duration; negative ones count as 0.
    """
    total = max(0, round(seconds))
    hours, remainder = divmod(total, 3600)
    minutes, remainder = divmod(remainder, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {remainder} s" if minutes else f"{remainder} s"


def first_few(items: Sequence[str], max_items: int = 3) -> list[str]:
    """Shorten a long list; its last item counts the omitted ones."""
    omitted = len(items) - max_items
    return [*items[:max_items], f"and {omitted} more"] if omitted > 0 else list(items)


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Return a table with two columns for notebooks, with all text escaped.

    Args:
        title: Caption of the table.
        rows: Name to value.
    """
    style = "text-align: left"
    cells = "".join(
        f'<tr><th style="{style}">{escape(str(name))}</th>'
        f'<td style="{style}">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption><tbody>{cells}</tbody></table>"
