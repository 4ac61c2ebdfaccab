"""Programs of interactive tasks, and private connections to them.

JupyterLab and TensorBoard listen on a socket file in a private directory, and each connection to a
shell gets its own sshd on a pair of sockets. Other users of the machine can reach none of them. A
command of ``zerolab task run --port`` listens on a port of 127.0.0.1.
"""

import asyncio
import getpass
import http.client
import importlib.util
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zerolab.errors import ConfigError
from zerolab.extensions.interactive.tunnels import LocalStream

__all__ = ["Notebook", "PortCommand", "Program", "Shell", "TensorBoard"]

_SHELL_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PATH")
"""Variables of the task that its shells get."""
_EXTRA = "install it on the agent's machine with `pip install 'zerolab[interactive]'`"


class Program:
    """Program of a task.

    Args:
        folder: Private directory for its socket and its settings.
    """

    kind = "port"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.socket = folder / "socket"
        self.user = ""
        self.host_key = ""

    def start(self) -> None:
        """Start the program.

        Raises:
            ConfigError: If it is not installed, or cannot be used here.
        """

    async def connect(self) -> LocalStream:
        """Open a connection to the program.

        Raises:
            OSError: If it does not listen yet.
        """
        return LocalStream(*await asyncio.open_unix_connection(str(self.socket)))

    def is_busy(self) -> bool:
        """Check whether it is computing, even without a connection."""
        return False


class Notebook(Program):
    """JupyterLab.

    Args:
        folder: Private directory for its socket and its settings.
        directory: Directory that it shows.
    """

    kind = "notebook"

    def __init__(self, folder: Path, directory: Path) -> None:
        super().__init__(folder)
        self._directory = directory

    def start(self) -> None:
        """Start JupyterLab; the server has checked its users, so it asks for no token."""
        _require("jupyterlab")
        if not self._directory.is_dir():
            problem = f"--directory: must be a directory of the machine, got {self._directory}"
            raise ConfigError("notebook", [problem])
        settings = {
            "ServerApp": {
                "sock": str(self.socket),
                "sock_mode": "0600",
                "open_browser": False,
                "root_dir": str(self._directory),
                "allow_remote_access": True,
                "allow_root": True,
                "trust_xheaders": True,
            },
            "IdentityProvider": {"token": ""},
            "LabApp": {"check_for_updates_class": "jupyterlab.NeverCheckForUpdate"},
        }
        file = self.folder / "jupyter_server_config.json"
        file.write_text(json.dumps(settings))
        environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(self.folder)}
        words = [sys.executable, "-m", "jupyterlab", f"--config={file}"]
        self.process = subprocess.Popen(words, env=environment)

    def is_busy(self) -> bool:
        """Check whether a kernel runs a cell."""
        connection = _UnixConnection(self.socket)
        try:
            connection.request("GET", "/api/kernels")
            kernels = json.loads(connection.getresponse().read())
            return any(kernel["execution_state"] == "busy" for kernel in kernels)
        except (OSError, ValueError, TypeError, KeyError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class TensorBoard(Program):
    """TensorBoard.

    Args:
        folder: Private directory for its socket.
        logdir: Directory with event files.
    """

    kind = "tensorboard"

    def __init__(self, folder: Path, logdir: Path) -> None:
        super().__init__(folder)
        self._logdir = logdir

    def start(self) -> None:
        """Start TensorBoard."""
        _require("tensorboard")
        module = "zerolab.extensions.interactive.tensorboard_server"
        words = [sys.executable, "-m", module, str(self._logdir), str(self.socket)]
        self.process = subprocess.Popen(words)


class PortCommand(Program):
    """Command of a user that listens on a port of 127.0.0.1.

    Args:
        folder: Private directory.
        command: The command.
        port: Its port.
    """

    def __init__(self, folder: Path, command: Sequence[str], port: int) -> None:
        super().__init__(folder)
        self._command = command
        self._port = port

    def start(self) -> None:
        """Start the command."""
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                problem = "is in use on this machine; choose another one, or start the task again"
                raise ConfigError("task", [f"--port {self._port}: {problem}"])
        try:
            self.process = subprocess.Popen(self._command)
        except OSError as error:
            problem = f"{self._command[0]!r} cannot be started: {error.strerror}"
            raise ConfigError("task", [problem]) from None

    async def connect(self) -> LocalStream:
        """Open a connection to the port."""
        return LocalStream(*await asyncio.open_connection("127.0.0.1", self._port))


class Shell(Program):
    """OpenSSH's server, one process for each connection.

    Args:
        folder: Private directory for its keys.
        keys: Public keys of the users who may log in, one per line.
    """

    kind = "shell"

    def __init__(self, folder: Path, keys: str) -> None:
        super().__init__(folder)
        self._keys = keys
        self._sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")

    def start(self) -> None:
        """Create the key of the host and the settings."""
        if self._sshd is None or shutil.which("ssh-keygen") is None:
            problem = "sshd and ssh-keygen must be installed on the agent's machine"
            raise ConfigError("shell", [f"{problem}; install openssh-server"])
        key = self.folder / "host_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        self.host_key = " ".join(key.with_suffix(".pub").read_text().split()[:2])
        self.user = getpass.getuser()
        authorized = self.folder / "authorized_keys"
        authorized.write_text(self._keys)
        variables = {name: os.environ[name] for name in _SHELL_VARIABLES if name in os.environ}
        environment = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        lines = [
            f"HostKey {key}",
            f"AuthorizedKeysFile {authorized}",
            f"AllowUsers {self.user}",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "PidFile none",
            "PrintMotd no",
            "ClientAliveInterval 30",
            "Subsystem sftp internal-sftp",
            f"SetEnv {' '.join(environment)}",
        ]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")
        if os.geteuid() == 0:  # it needs this empty directory then
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)

    async def connect(self) -> LocalStream:
        """Start an sshd for one connection."""
        ours, theirs = socket.socketpair()
        with theirs:
            await asyncio.create_subprocess_exec(
                str(self._sshd), "-i", "-f", str(self.folder / "sshd_config"),
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL,
            )  # fmt: skip
        return LocalStream(*await asyncio.open_unix_connection(sock=ours))


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=5)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket file."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError("task", [f"{module} is not installed; {_EXTRA}"])


def private_folder() -> Path:
    """Return a new directory that only this user can enter; socket files need short paths."""
    return Path(tempfile.mkdtemp(prefix="zerolab-"))
