"""Data directory of an installation: the names of all files inside."""

import contextlib
import errno
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import Self

import msgspec

from zerolab.contract.spec import ENV_HOME, ENV_MASTER, ENV_TOKEN
from zerolab.errors import ConfigError
from zerolab.files import create_private, read_json, write_atomic

__all__ = ["Home", "named_master", "server_url", "token_of"]

logger = logging.getLogger(__name__)


class Home(msgspec.Struct, frozen=True):
    """The data directory of an installation: token, database, archives, checkpoints, runs, logs.

    The constructor has no effect on the disk; :meth:`create` creates the directories.
    """

    path: Path

    @classmethod
    def default(cls) -> Self:
        """Return the directory that ``ZEROLAB_HOME`` names, or ``~/.zerolab``."""
        directory = os.environ.get(ENV_HOME)
        return cls(
            Path(directory).expanduser().absolute() if directory else Path.home() / ".zerolab"
        )

    @property
    def token_file(self) -> Path:
        """File with the token of the installation."""
        return self.path / "token"

    @property
    def agent_token_file(self) -> Path:
        """File with the join token of agents, which is valid for the routes of agents only."""
        return self.path / "agent.token"

    @property
    def keys_file(self) -> Path:
        """File with the keys with which the server signs tokens of runs and cookies of browsers."""
        return self.path / "keys.json"

    @property
    def server_file(self) -> Path:
        """``{"url", "pid"}`` of the server while it runs."""
        return self.path / "server.json"

    @property
    def agent_file(self) -> Path:
        """``{"pid", "master"}`` of the agent while it runs, ``agent_id`` once it has one."""
        return self.path / "agent.json"

    @property
    def identity_file(self) -> Path:
        """File with the identity of this directory's agent."""
        return self.path / "agent.id"

    @property
    def database(self) -> Path:
        """The SQLite database; only the server opens it."""
        return self.path / "zerolab.db"

    @property
    def backups(self) -> Path:
        """Backups of the database, a directory each."""
        return self.path / "backups"

    @property
    def archives(self) -> Path:
        """Submitted model directories."""
        return self.path / "archives"

    @property
    def checkpoints(self) -> Path:
        """Root of the checkpoint storage: one directory for each uuid."""
        return self.path / "checkpoints"

    @property
    def cache(self) -> Path:
        """Local cache of checkpoints in object stores, for this installation's agent."""
        return self.path / "cache"

    @property
    def id_file(self) -> Path:
        """File with the id of this installation in storages."""
        return self.path / "id"

    @property
    def runs(self) -> Path:
        """One directory for each run that the agent of this installation has had."""
        return self.path / "runs"

    @property
    def searchers(self) -> Path:
        """Working directories of the processes of custom searcher classes."""
        return self.path / "searchers"

    @property
    def logs(self) -> Path:
        """``server.log`` and ``agent.log``."""
        return self.path / "logs"

    @property
    def launches(self) -> Path:
        """Output of the ranks of ``zerolab launch``: a directory for each start."""
        return self.logs / "launch"

    @property
    def up_lock(self) -> Path:
        """Lock of ``zerolab up`` and ``zerolab down``."""
        return self.path / "up.lock"

    @property
    def agent_lock(self) -> Path:
        """Lock of the agent while it runs: one agent per directory."""
        return self.path / "agent.lock"

    def run(self, run_id: int) -> Path:
        """Directory of one run."""
        return self.runs / str(run_id)

    def create(self) -> Self:
        """Create missing directories, readable only by their owner.

        Raises:
            ConfigError: If the directory is not writable.
        """
        try:
            for directory in (self.path, self.archives, self.checkpoints, self.runs, self.logs):
                directory.mkdir(mode=0o700, parents=directory is self.path, exist_ok=True)
                if not os.access(directory, os.W_OK):
                    raise PermissionError(errno.EACCES, "Permission denied", str(directory))
        except OSError as error:
            raise self.unwritable_error(error) from error
        return self

    def unwritable_error(self, error: OSError) -> ConfigError:
        """Return the error for an unusable data directory, with a remedy."""
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        default_remedy = f"set {ENV_HOME} to a directory of yours"
        remedy = "free some space on its disk" if full else default_remedy
        problem = f"cannot be written ({error}); {remedy}"
        return ConfigError(f"data directory {self.path}", [problem])

    def identity(self) -> str:
        """Return the identity of this directory's agent, created on first use."""
        with contextlib.suppress(FileNotFoundError):
            saved = self.identity_file.read_text(encoding="ascii").strip()
            if saved:
                return saved
        write_atomic(self.identity_file, f"{secrets.token_hex(16)}\n".encode())
        return self.identity_file.read_text(encoding="ascii").strip()

    def read_token(self) -> str | None:
        """Return the token of the installation, or None before the first start."""
        return _read_token(self.token_file)

    def ensure_token(self) -> str:
        """Return the token of the installation, created randomly on first use.

        Concurrent processes get the same token. A file that others can read is made private.
        """
        return _ensure_token(self.token_file, "zerolab token --renew")

    def replace_token(self) -> str:
        """Replace the token of the installation by a new random one; return it."""
        return _replace_token(self.token_file)

    def read_agent_token(self) -> str | None:
        """Return the join token of agents, or None before the first start of a server."""
        return _read_token(self.agent_token_file)

    def ensure_agent_token(self) -> str:
        """Return the join token of agents, created randomly on first use."""
        return _ensure_token(self.agent_token_file, "zerolab agent token --renew")

    def replace_agent_token(self) -> str:
        """Replace the join token of agents by a new random one; return it."""
        return _replace_token(self.agent_token_file)

    def ensure_id(self) -> str:
        """Return this installation's id in storages, created randomly on first use."""
        create_private(self.id_file, f"{secrets.token_hex(4)}\n".encode())
        return self.id_file.read_text(encoding="ascii").strip()


def _read_token(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip() or None
    except FileNotFoundError:
        return None


def _ensure_token(file: Path, renewal: str) -> str:
    token = _read_token(file)
    if token is not None:
        _close_token(file, renewal)
    if token is None:
        create_private(file, f"{secrets.token_urlsafe(32)}\n".encode())
        token = _read_token(file)
    return token or _replace_token(file)  # the file is empty


def _replace_token(file: Path) -> str:
    token = secrets.token_urlsafe(32)
    write_atomic(file, f"{token}\n".encode())
    return token


def _close_token(file: Path, renewal: str) -> None:
    """Make a token file private, and log how to get a new token."""
    mode = stat.S_IMODE(file.stat().st_mode)
    if not mode & 0o077:
        return
    with contextlib.suppress(OSError):  # another owner's, or a file system without modes
        file.chmod(0o600)
    logger.warning(
        "%s could be read by others (mode %03o) and is closed now; if someone may have read "
        "it, make a new one: %s",
        file,
        mode,
        renewal,
    )


def named_master() -> str | None:
    """Return the address of ``--master`` or of the environment, or None."""
    return os.environ.get(ENV_MASTER) or None


def server_url(home: Home) -> str | None:
    """Return the address of the named server, or of this installation's."""
    local_url = (read_json(home.server_file) or {}).get("url")
    return named_master() or (str(local_url) if local_url else None)


def token_of(home: Home) -> str:
    """Return the token to use; empty if it does not exist yet."""
    return os.environ.get(ENV_TOKEN) or home.read_token() or ""
