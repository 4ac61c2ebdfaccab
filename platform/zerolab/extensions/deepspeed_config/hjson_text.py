"""Text of engine files that is hjson: JSON with comments and superfluous commas."""

from typing import Any

from zerolab.config.files import PLAIN_WORDS, KeyCollector, decode_text
from zerolab.errors import ConfigError
from zerolab.schema.section import Path as Keys
from zerolab.schema.section import dotted

__all__ = ["parse_hjson"]


def parse_hjson(text: bytes | str, source: str) -> dict[str, Any] | None:
    """Read JSON with comments, superfluous commas and the other extensions of hjson.

    Text without quotes reaches to the end of its line in hjson, a comma included. Such a value is
    an error.

    Args:
        text: The content of a file.
        source: Its name, for messages.

    Returns:
        The content; None if it is not hjson, or not an object in braces.

    Raises:
        ConfigError: If it names a key twice, or holds text without quotes before a comma.
    """
    import hjson

    collect = KeyCollector()
    text = decode_text(text, source)
    problems: list[str] = []
    try:
        content = _with_constants(hjson.loads(text, object_pairs_hook=collect), (), problems)
    except (ValueError, ArithmeticError, RecursionError):
        return None
    if not isinstance(content, dict) or "{" not in text:
        return None
    collect.refuse(source)
    if problems:
        raise ConfigError(source, problems)
    return content


_ENDLESS = ("Infinity", "-Infinity", "NaN")


def _with_constants(value: Any, path: Keys, problems: list[str]) -> Any:
    """Convert numbers in unquoted text, and record errors."""
    if isinstance(value, dict):
        return {key: _with_constants(inner, (*path, key), problems) for key, inner in value.items()}
    if isinstance(value, list):
        return [
            _with_constants(inner, (*path, index), problems) for index, inner in enumerate(value)
        ]
    if not isinstance(value, str):
        return value
    word = value.removesuffix(",")
    if word in _ENDLESS:
        return float(word)
    if word in PLAIN_WORDS:
        problems.append(f"{dotted(path)}: must be JSON, got {word}; write {PLAIN_WORDS[word]}")
    elif value.endswith(","):
        problems.append(f'{dotted(path)}: must be in "double quotes" or be JSON, got {word}')
    return value
