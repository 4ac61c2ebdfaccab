"""Simulated machines: network namespaces on a bridge, each with an address."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import pytest

__all__ = ["Network", "network"]


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


class Network:
    """N namespaces, ``{prefix}1`` etc., with the addresses ``10.{net}.0.1`` etc."""

    def __init__(self, prefix: str, net: int, count: int) -> None:
        self.prefix = prefix
        self.names = [f"{prefix}{number}" for number in range(1, count + 1)]
        self.addresses = [f"10.{net}.0.{number}" for number in range(1, count + 1)]
        self.host = f"10.{net}.0.254"
        """Address of this machine itself."""
        self._bridge = f"{prefix}br"

    def make(self) -> None:
        """Create the namespaces."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.host}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("netns", "add", name)
            _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{name}v", "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def cut(self, name: str) -> None:
        """Disconnect a machine."""
        _ip("link", "set", f"{name}v", "down")

    def mend(self, name: str) -> None:
        """Connect a machine again."""
        _ip("link", "set", f"{name}v", "up")

    def processes(self, name: str) -> list[int]:
        """Return the processes that run in a machine."""
        command = ["ip", "netns", "pids", name]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return [int(word) for word in done.stdout.split()]

    def remove(self) -> None:
        """Remove everything that :meth:`make` created."""
        for name in self.names:
            for pid in self.processes(name):  # e.g. slurmstepd, which survives a disconnected node
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # Delete the link separately: with the namespace it disappears later, during the next
            # test.
            for command in (("link", "del", f"{name}v"), ("netns", "del", name)):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*command)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)


@contextmanager
def network(prefix: str, net: int, count: int = 2) -> Iterator[Network]:
    """Provide machines within the context; skip the test if that is not possible.

    Names and addresses are unique on this machine: another test run waits for them.
    """
    if shutil.which("ip") is None:
        pytest.skip("network namespaces: the command ip (iproute2) is not installed")
    if os.geteuid() != 0:
        pytest.skip("network namespaces: only root may make them")
    created = Network(prefix, net, count)
    with filelock.FileLock(Path(tempfile.gettempdir()) / f"zerolab-{prefix}.lock"):
        try:
            created.make()
        except subprocess.CalledProcessError as error:
            created.remove()
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        try:
            yield created
        finally:
            created.remove()
