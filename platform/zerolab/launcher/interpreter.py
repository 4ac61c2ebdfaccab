"""Python interpreters of a run's ranks: location and check."""

import os
import subprocess
from pathlib import Path

from zerolab import __version__

__all__ = ["find_interpreter", "interpreter_problem"]

_PROBE = (
    "import importlib.util, zerolab, zerotrial; "
    "assert importlib.util.find_spec('torch'), 'there is no module torch'; "
    "print(zerolab.__version__)"
)
_PROBE_TIMEOUT_S = 120.0
"""Timeout in seconds; an interpreter on a network file system is slow at first."""


def find_interpreter(named: str) -> Path:
    """Return the interpreter of ``environment.python``, which may name an environment.

    Args:
        named: Path of an interpreter, or of the directory of a conda or virtual environment.
    """
    path = Path(named).expanduser()
    return path / "bin" / "python" if path.is_dir() else path


def interpreter_problem(named: str) -> str | None:
    """Return why ranks cannot run under an interpreter on this machine, in one line, or None.

    Args:
        named: As in ``environment.python``.
    """
    path = find_interpreter(named)
    key = "environment.python: must be an interpreter, or the directory of an environment"
    if not path.is_file():
        return f"{key}, on this machine, and {path} is not there"
    if not os.access(path, os.X_OK):
        return f"{key}, and {path} is not executable: `chmod +x {path}`"
    try:
        looked = subprocess.run(
            [str(path), "-P", "-c", _PROBE],
            capture_output=True, text=True, check=False, timeout=_PROBE_TIMEOUT_S, cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{key}, and {path} cannot be run: {error}"
    install = f"`{path} -m pip install zerolab=={__version__}`"
    if looked.returncode:
        message = (looked.stderr.strip().splitlines() or ["it says nothing"])[-1][:300]
        return (
            f"environment.python: {path} cannot import zerotrial: {message}; install it: {install}"
        )
    if looked.stdout.split()[-1:] != [__version__]:
        version = looked.stdout.strip()[:50]
        text = (
            f"environment.python: {path} has zerolab {version}, this machine's agent {__version__}"
        )
        return f"{text}; install the same one: {install}"
    return None
