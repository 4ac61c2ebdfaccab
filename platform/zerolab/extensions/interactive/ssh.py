"""ssh to shells: the key of the user, the configuration, and the connection through the server."""

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolab.contract.names import HOST_KEY, USER_NAME
from zerolab.errors import ConfigError
from zerolab.files import create_private
from zerolab.paths import Home

__all__ = ["config_block", "connect", "public_key", "remember_host"]


def _folder(home: Home) -> Path:
    folder = home.path / "ssh"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def public_key(home: Home) -> str:
    """Return the public key for shells; create the pair of keys first if it is missing.

    Args:
        home: Data directory with the keys.

    Raises:
        ConfigError: If ssh-keygen is not installed.
    """
    key = _folder(home) / "id_ed25519"
    if not key.exists():
        if shutil.which("ssh-keygen") is None:
            raise ConfigError("shell", ["ssh-keygen must be installed; install openssh-client"])
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "zerolab", "-f", str(key)]
        subprocess.run(words, check=True)
    return key.with_suffix(".pub").read_text()


def host_of(task_id: int) -> str:
    """Return the host name of a shell in the configuration of ssh."""
    return f"zerolab-{task_id}"


def remember_host(home: Home, shell: Mapping[str, Any]) -> Path:
    """Write the key of a shell's host; return the file for ``UserKnownHostsFile``.

    Args:
        home: Data directory.
        shell: The shell, as the server describes it.

    Raises:
        ConfigError: If its user name or its key could be read as another line of the files of ssh.
    """
    # The run of the shell has reported them, which may be that of another user.
    for key, pattern in (("user", USER_NAME), ("host_key", HOST_KEY)):
        if re.fullmatch(pattern, shell[key]) is None:
            task = f"shell {shell['experiment_id']}"
            raise ConfigError(task, [f"{key}: must match {pattern}, got {shell[key]!r}"])
    file = _folder(home) / f"known_hosts-{shell['experiment_id']}"
    line = f"{host_of(shell['experiment_id'])} {shell['host_key']}\n"
    if not file.exists() or file.read_text() != line:
        file.unlink(missing_ok=True)
        create_private(file, line.encode())
    return file


def config_block(home: Home, shell: Mapping[str, Any], url: str) -> str:
    """Return the lines of ssh_config for a shell.

    Args:
        home: Data directory.
        shell: The shell, as the server describes it.
        url: Address of the server; the token is never part of the configuration.

    Raises:
        ConfigError: If its user name or its key could be read as another line of the files of ssh.
    """
    task_id = shell["experiment_id"]
    known_hosts = remember_host(home, shell)
    words = ["env", f"ZEROLAB_MASTER={url}"]
    if "ZEROLAB_HOME" in os.environ:
        words.append(f"ZEROLAB_HOME={home.path}")
    words += [sys.executable, "-m", "zerolab", "shell", "connect", str(task_id)]
    lines = [
        f"Host {host_of(task_id)}",
        f"  HostName {host_of(task_id)}",
        f"  User {shell['user']}",
        f"  ProxyCommand {shlex.join(words).replace('%', '%%')}",
        f"  IdentityFile {_quoted(_folder(home) / 'id_ed25519')}",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {_quoted(known_hosts)}",
        "  GlobalKnownHostsFile /dev/null",
        "  StrictHostKeyChecking yes",
    ]
    return "\n".join(lines) + "\n"


def _quoted(path: Path) -> str:
    return f'"{path}"' if " " in str(path) else str(path)


def connect(url: str, token: str, task_id: int) -> None:
    """Connect standard input and output to a shell; ssh runs this as its ProxyCommand.

    Args:
        url: Address of the server.
        token: Token of the user.
        task_id: The task.

    Raises:
        ZerolabError: If the server does not respond, or refuses.
    """
    asyncio.run(_connect(url, token, task_id))


async def _connect(url: str, token: str, task_id: int) -> None:
    from zerolab.extensions.interactive.tunnels import (
        LocalStream,
        open_http,
        open_tunnel,
        relay,
    )

    loop = asyncio.get_running_loop()
    async with open_http(url, token) as http, open_tunnel(http, f"/proxy/{task_id}/") as remote:
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, sys.stdout.buffer
        )
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        await relay(LocalStream(reader, writer), remote)
