"""Users' regular expressions, matched in time linear in the text.

Python's ``re`` backtracks: ``(a+)+$`` and one line of 40 characters keep it busy for hours, and
block the interpreter. RE2 does not backtrack, and rejects patterns that need it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

__all__ = ["SYNTAX", "compile_any", "compile_pattern"]

SYNTAX = "https://github.com/google/re2/wiki/Syntax"

_MOST_BYTES = 1024 * 1024
"""Memory of a compiled pattern with its automata; matching a line takes milliseconds at most."""


def compile_any(patterns: Sequence[str]) -> Any:
    """Compile an alternation of valid patterns."""
    import re2

    options = re2.Options()
    options.max_mem = _MOST_BYTES * len(patterns)
    options.log_errors = False
    return re2.compile("|".join(f"(?:{pattern})" for pattern in patterns), options)


@lru_cache(maxsize=256)
def compile_pattern(text: str) -> Any:
    """Compile a pattern; its ``search`` is linear in the length of the text.

    Raises:
        ValueError: If it is not a regular expression, or needs backtracking.
    """
    import re2  # takes 15 ms: only for experiments with patterns

    options = re2.Options()
    options.max_mem = _MOST_BYTES
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except (re2.error, UnicodeError) as error:
        reason = error.args[0] if error.args else error
        reason = reason.decode(errors="replace") if isinstance(reason, bytes) else reason
        msg = (
            f"must be a regular expression that RE2 reads, got {text[:200]!r} ({reason}); "
            f"lookaround, backreferences and repetitions above 1000 are not in it: {SYNTAX}"
        )
        raise ValueError(msg) from None
