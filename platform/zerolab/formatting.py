"""How much there is, as people read it: bytes, spans of time, and lists too long to be read."""

from collections.abc import Sequence

__all__ = ["duration_text", "first_few", "size_text"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(size: float) -> str:
    """Write a number of bytes, in units of 1000: ``512 B``, ``1.5 kB``, ``40.2 MB``.

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
    """Write a span of time in two units: ``1 h 12 min``, ``3 min 5 s``, ``40 s``.

    Args:
        seconds: The span; one below 0 counts as 0.
    """
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def first_few(things: Sequence[str], most: int = 3) -> list[str]:
    """Cut a list that may be long and all of one cause; what is left out is counted at its end."""
    left = len(things) - most
    return [*things[:most], f"and {left} more"] if left > 0 else list(things)
