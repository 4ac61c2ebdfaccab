"""Text in files that a spreadsheet opens."""

__all__ = ["safe_cell"]

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def safe_cell(text: str) -> str:
    """Keep a spreadsheet from reading text as a formula: a quote before it, as they do."""
    return f"'{text}" if text.startswith(_FORMULA) else text
