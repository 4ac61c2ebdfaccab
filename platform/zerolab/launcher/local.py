"""Launcher of ranks on the agent's machine, forked from a process with torch if possible."""

from collections.abc import Mapping, Sequence

from zerolab.contract.messages import SlotInfo
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import read_run_spec
from zerolab.launcher.fork_client import ForkServer
from zerolab.launcher.interface import LauncherProcess
from zerolab.launcher.process import (
    kill_leftovers,
    save_launcher_pid,
    start_launcher,
    stop_launcher,
)
from zerolab.paths import Home

__all__ = ["LocalLauncher"]


class LocalLauncher:
    """Launcher of ranks on this machine.

    Args:
        home: Data directory of the agent.
        slots: Slots of the agent. Launchers are only forked for CPU slots because CUDA does not
            survive a fork.
    """

    def __init__(self, home: Home, slots: Sequence[SlotInfo]) -> None:
        self._slots = slots
        self._log = home.logs / "fork_server.log"
        self._forks = all(slot.device == "cpu" for slot in slots)
        self._fork_server: ForkServer | None = None

    def keep_ready(self) -> None:
        """Start a fork server if needed; the kernel kills it when the calling thread ends."""
        if self._forks and (self._fork_server is None or self._fork_server.lost):
            self._fork_server = ForkServer(self._log)

    def offers(self) -> Sequence[SlotInfo]:
        """Return the slots, which never change."""
        return self._slots

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        """Fork a launcher if possible, else start one; the launcher starts the ranks.

        The fork server has the agent's interpreter: runs with another one are not forked.
        """
        run = read_run_spec(folder.spec)
        forks = self._fork_server is not None and not run.python
        start = self._fork_server.start if forks and self._fork_server else start_launcher
        process = start(folder, environment)
        save_launcher_pid(folder, process)
        return process

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        """Stop a launcher and its ranks."""
        return stop_launcher(process, grace_s)

    def sweep(self, folder: RunFolder) -> int:
        """Kill the remaining child processes of the ranks."""
        return kill_leftovers(folder)

    def close(self) -> None:
        """End the fork server."""
        if self._fork_server is not None:
            self._fork_server.close()
