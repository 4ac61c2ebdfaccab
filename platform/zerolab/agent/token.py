"""Token of an agent, hidden from everything that the agent starts.

A trial runs as the same Unix user as its agent and can read ``/proc/PID/environ``, which shows the
environment a process was started with, even after a variable was removed. So the agent replaces
itself by a process without the variable (:func:`hide_environment_token`).
"""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from zerolab.contract.spec import ENV_DATABASE, ENV_TOKEN
from zerolab.errors import ConfigError
from zerolab.paths import Home

__all__ = ["agent_token", "hide_environment_token"]

_ENV_PIPE = "ZEROLAB_TOKEN_PIPE"
"""File descriptor from which the agent reads the token that was in its environment."""
_STDIN = "-"
_TOKEN_BYTES = 4096


def hide_environment_token() -> str:
    """Return the token of ``ZEROLAB_TOKEN`` or an empty text, and remove it.

    The first call replaces the process by the same command without the variable; the token goes
    through a pipe. The address of the server's database, which an agent must not have, is removed
    as well. Call it before anything is started.
    """
    database = os.environ.pop(ENV_DATABASE, "")
    token = os.environ.pop(ENV_TOKEN, "")
    if token or database:
        reading, writing = os.pipe()
        os.write(writing, token.encode()[:_TOKEN_BYTES])
        os.close(writing)
        os.set_inheritable(reading, True)  # noqa: FBT003 - the standard library's
        environment = {**os.environ, _ENV_PIPE: str(reading)}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - ourselves
    pipe = os.environ.pop(_ENV_PIPE, "")
    if not pipe.isdecimal():
        return ""
    with os.fdopen(int(pipe), "rb") as file:
        return file.read(_TOKEN_BYTES).decode()


def agent_token(named: str, environment_token: str, home: Home) -> tuple[str, Callable[[], str]]:
    """Return the token of an agent, and a function that reads it again after a renewal.

    Args:
        named: File that holds the token, ``-`` for standard input, empty for neither.
        environment_token: Token of the environment; used when no file is named.
        home: Data directory of the installation, whose own token is the default.

    Raises:
        ConfigError: If the file cannot be read, or others can read it.
    """
    if named == _STDIN:
        token = sys.stdin.readline(_TOKEN_BYTES).strip()
        if not token:
            raise ConfigError(
                "agent", ["--token-file: must be a token on standard input, got none"]
            )
        return token, lambda: token
    if named:
        return _read_file(Path(named)), lambda: _read_file(Path(named))
    if environment_token:
        return environment_token, lambda: environment_token

    def own() -> str:
        return home.read_agent_token() or home.read_token() or ""

    return own(), own


def _read_file(file: Path) -> str:
    try:
        status = file.stat()
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"--token-file: must be a readable file with a token, got {file} ({error})"
        raise ConfigError("agent", [problem]) from None
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode) and mode & 0o077:
        problem = f"must be readable by its owner only, got mode {mode:04o}; run `chmod 600 {file}`"
        raise ConfigError("agent", [f"--token-file: {problem}"])
    if not token:
        raise ConfigError("agent", [f"--token-file: must hold a token, got the empty file {file}"])
    return token
