"""A real sshd of the current user on a high port with test keys, or in a namespace."""

import contextlib
import getpass
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import free_port, until

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


@dataclass(frozen=True)
class Machine:
    """A name for ssh, and the address of its sshd."""

    name: str
    address: str
    port: int


class Keys:
    """Keys of the hosts and of the user, and the matching ssh configuration."""

    def __init__(self, folder: Path) -> None:
        if SSHD is None or shutil.which("ssh-keygen") is None:
            pytest.skip("sshd is not installed (openssh-server)")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.config = folder / "config"
        self.known_hosts = folder / "known_hosts"
        for name in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)

    def write_config(self, machines: Sequence[Machine]) -> None:
        """Configure ssh for these machines and their keys."""
        key = (self.folder / "host_key.pub").read_text().strip()
        blocks, known_hosts = [], []
        for machine in machines:
            blocks.append(
                f"Host {machine.name}\n  HostName {machine.address}\n  Port {machine.port}\n"
            )
            known_hosts.append(f"[{machine.address}]:{machine.port} {key}\n")
        user_key = self.folder / "user_key"
        blocks.append(
            f"Host *\n  IdentityFile {user_key}\n  IdentitiesOnly yes\n  User {getpass.getuser()}\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )
        self.config.write_text("\n".join(blocks))
        self.known_hosts.write_text("".join(known_hosts))


@contextmanager
def sshd(keys: Keys, machine: Machine, namespace: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Run an sshd for a machine within the context."""
    folder = keys.folder / machine.name
    folder.mkdir(exist_ok=True)
    lines = [
        f"ListenAddress {machine.address}:{machine.port}",
        f"HostKey {keys.folder / 'host_key'}",
        f"AuthorizedKeysFile {keys.folder / 'user_key.pub'}",
        f"PidFile {folder / 'pid'}",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "PermitRootLogin prohibit-password",
    ]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    with_rights = Path("/run/sshd")  # as root it needs an empty directory
    with contextlib.suppress(OSError):
        with_rights.mkdir(mode=0o755, exist_ok=True)
    enter = ["ip", "netns", "exec", namespace] if namespace else []
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*enter, str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        until(
            "sshd listens",
            log.read_text,
            lambda text: "Server listening" in text or process.poll() is not None,
        )
        if process.poll() is not None:
            pytest.skip(f"sshd cannot be started here: {log.read_text().strip()}")
        yield process
    finally:
        process.terminate()
        process.wait()


def loopback_machine(name: str) -> Machine:
    """Return a machine of that name at this one's loopback address."""
    return Machine(name, "127.0.0.1", free_port())
