"""Another Python for a run's ranks: which file is meant, and whether it can train."""

import os
import subprocess
from pathlib import Path

from zerolab import __version__

__all__ = ["find_interpreter", "interpreter_problem"]

_LOOK = (
    "import importlib.util, zerolab, zerotrial; "
    "assert importlib.util.find_spec('torch'), 'there is no module torch'; "
    "print(zerolab.__version__)"
)
_LOOK_S = 120.0
"""For an interpreter on a network's disk that nobody has read yet, in seconds."""


def find_interpreter(named: str) -> Path:
    """Return the interpreter that ``environment.python`` names: itself, or that of an environment.

    Args:
        named: Path of an interpreter, or of the directory of a conda or virtual environment.
    """
    path = Path(named).expanduser()
    return path / "bin" / "python" if path.is_dir() else path


def interpreter_problem(named: str) -> str | None:
    """Say in one line why ranks cannot run under an interpreter on this machine; None if they can.

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
            [str(path), "-P", "-c", _LOOK],
            capture_output=True, text=True, check=False, timeout=_LOOK_S, cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{key}, and {path} cannot be run: {error}"
    install = f"`{path} -m pip install zerolab=={__version__}`"
    if looked.returncode:
        said = (looked.stderr.strip().splitlines() or ["it says nothing"])[-1][:300]
        return f"environment.python: {path} cannot import zerotrial: {said}; install it: {install}"
    if looked.stdout.split()[-1:] != [__version__]:
        found = looked.stdout.strip()[:50]
        text = f"environment.python: {path} has zerolab {found}, this machine's agent {__version__}"
        return f"{text}; install the same one: {install}"
    return None
