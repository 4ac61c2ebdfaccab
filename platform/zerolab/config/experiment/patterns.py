"""Regular expressions of users: matched in time linear in the text, whatever they say.

Python's own ``re`` backtracks: ``(a+)+$`` and one line of 40 characters keep it busy for hours,
and hold the interpreter all the while. RE2 does not, and refuses what cannot be done without.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

__all__ = ["SYNTAX", "compile_any", "compile_pattern"]

SYNTAX = "https://github.com/google/re2/wiki/Syntax"

_MOST_BYTES = 1024 * 1024
"""Of a compiled pattern, with its automata; a line takes milliseconds at worst."""


def compile_any(patterns: Sequence[str]) -> Any:
    """Compile the alternation of correct patterns: it is found where one of them is."""
    import re2

    options = re2.Options()
    options.max_mem = _MOST_BYTES * len(patterns)
    options.log_errors = False
    return re2.compile("|".join(f"(?:{pattern})" for pattern in patterns), options)


@lru_cache(maxsize=256)
def compile_pattern(text: str) -> Any:
    """Compile a pattern; its ``search`` is linear in the length of the text.

    Raises:
        ValueError: If it is no regular expression, or one that needs backtracking.
    """
    import re2  # 15 ms, which nobody pays who has no patterns

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
