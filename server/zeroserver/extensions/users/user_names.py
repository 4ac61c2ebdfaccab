"""Names of users."""

import re

__all__ = ["USER_NAME", "is_user_name"]

_PATTERN = re.compile(r"[a-z0-9][a-z0-9._@-]{0,63}")

USER_NAME = (
    "1 to 64 lower-case letters, digits, '.', '_', '@' or '-', starting with a letter or digit"
)
"""Form of a name, for messages."""


def is_user_name(name: str) -> bool:
    """Check the form of a name."""
    return _PATTERN.fullmatch(name) is not None
