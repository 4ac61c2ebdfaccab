"""Directory of a live run: its reports until the server has them.

```
external.json   id, session, name, labels and hyperparameters
spool/          reports
media/          media
logs/           output of the script
end.json        how the script ended
delivered       the server has everything
lock            held by the process that reports
```
"""

import re
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock

from zerolab.contract.run_folder import RunFolder
from zerolab.errors import ConfigError
from zerolab.files import write_atomic

__all__ = ["LIVE_DIR", "LiveDirectory", "LiveRunInfo", "check_id", "find_live_directories"]

LIVE_DIR = Path(".zerolab", "live")
"""Directory of live runs, below the working directory of the script."""
_INFO = "external.json"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class LiveRunInfo(msgspec.Struct, frozen=True):
    """Values with which the server creates the experiment."""

    id: str
    session: str
    name: str
    description: str = ""
    labels: list[str] = []
    hparams: dict[str, Any] = {}
    project: str = ""
    """Project of a new experiment; empty for the default project."""
    create_project: bool = False
    """Whether to create the project if it is missing."""
    server: str = ""
    """Address of the server to which the script reports; empty if it is offline."""


class _End(msgspec.Struct, frozen=True):
    error: str | None


class LiveDirectory:
    """Paths and state of one live run.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = RunFolder(path)
        self.lock = FileLock(path / "lock")

    @classmethod
    def create(cls, path: Path, info: LiveRunInfo) -> "LiveDirectory":
        """Create the directory of a new session, and lock it."""
        directory = cls(path)
        directory.folder.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.lock.acquire()
        directory.write_info(info)
        return directory

    def write_info(self, info: LiveRunInfo) -> None:
        """Store the description of the run."""
        write_atomic(self.path / _INFO, msgspec.json.encode(info))

    def read_info(self) -> LiveRunInfo:
        """Return the description of the run.

        Raises:
            ConfigError: If it is damaged.
        """
        try:
            return msgspec.json.decode((self.path / _INFO).read_bytes(), type=LiveRunInfo)
        except (msgspec.DecodeError, OSError) as error:
            problem = f"{_INFO}: must describe a live run: {error}"
            raise ConfigError(str(self.path), [problem]) from error

    def write_end(self, error: str | None) -> None:
        """Store how the script ended."""
        write_atomic(self.path / "end.json", msgspec.json.encode(_End(error)))

    def read_end(self) -> str | None:
        """Return the error of the script; None if it completed."""
        try:
            return msgspec.json.decode((self.path / "end.json").read_bytes(), type=_End).error
        except FileNotFoundError:
            return "the process ended without a result; it was killed, or the machine stopped"

    @property
    def is_delivered(self) -> bool:
        """Whether the server has everything."""
        return self.folder.delivered.exists()


def find_live_directories(root: Path) -> list[LiveDirectory]:
    """Return the live runs in a directory and below it, oldest first."""
    paths = [file.parent for file in [*root.glob(_INFO), *root.rglob(f"*/{_INFO}")]]
    return [LiveDirectory(path) for path in sorted(set(paths), key=lambda path: path.name)]


def check_id(run_id: str) -> str:
    """Check the id of a live run.

    Raises:
        ConfigError: If it is invalid.
    """
    if _ID.fullmatch(run_id) is None:
        problem = "must have 1 to 128 letters, digits, dots, dashes or underscores"
        raise ConfigError("init", [f"id: {problem}, got {run_id[:150]!r}"])
    return run_id
