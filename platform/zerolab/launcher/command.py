"""What an entrypoint means: a trial class for the harness, or a command to run as it is."""

import re
import shlex
from collections.abc import Sequence

from zerolab.errors import ConfigError

__all__ = ["command_of"]

_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def command_of(entrypoint: str | Sequence[str]) -> list[str] | None:
    """Return the command that an entrypoint is, or None when it names a trial class.

    Args:
        entrypoint: ``module:Class``; or a command, as one string (split as a shell would, but no
            shell runs it) or as a list of words.

    Raises:
        ConfigError: If it is empty or cannot be split.
    """
    if isinstance(entrypoint, str) and _CLASS.fullmatch(entrypoint.strip()):
        return None
    try:
        words = shlex.split(entrypoint) if isinstance(entrypoint, str) else list(entrypoint)
    except ValueError as error:
        raise ConfigError("entrypoint", [f"is not a command ({error}): {entrypoint!r}"]) from error
    if not words:
        raise ConfigError("entrypoint", ["must be module:Class or a command, got nothing"])
    return words
