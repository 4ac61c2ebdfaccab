"""Escaping of text for spreadsheets."""

__all__ = ["safe_cell"]

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def safe_cell(text: str) -> str:
    """Prefix a text with a quote if a spreadsheet would read it as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
