"""Ranks on the agent's own machine: forked from a process that has imported torch, or afresh."""

from collections.abc import Mapping, Sequence

from zerolab.contract.messages import SlotInfo
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import read_run_spec
from zerolab.launcher.fork_client import ForkServer
from zerolab.launcher.interface import LauncherProcess
from zerolab.launcher.process import (
    kill_leftovers,
    note_launcher,
    start_launcher,
    stop_launcher,
)
from zerolab.paths import Home

__all__ = ["LocalLauncher"]


class LocalLauncher:
    """See :class:`~zerolab.launcher.interface.Launcher`.

    Args:
        home: Data directory of the agent.
        slots: That it offers. On CPU slots launchers are forked, for CUDA does not survive a fork.
    """

    def __init__(self, home: Home, slots: Sequence[SlotInfo]) -> None:
        self._slots = slots
        self._log = home.logs / "fork_server.log"
        self._forks = all(slot.device == "cpu" for slot in slots)
        self._fork_server: ForkServer | None = None

    def keep_ready(self) -> None:
        """Have a fork server; the kernel kills it when the calling thread ends."""
        if self._forks and (self._fork_server is None or self._fork_server.lost):
            self._fork_server = ForkServer(self._log)

    def offers(self) -> Sequence[SlotInfo]:
        """Return the slots, which are always there."""
        return self._slots

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        """Fork a launcher where that can be, else start one; it starts the ranks.

        The fork server has the agent's interpreter: a run that wants another one is not forked.
        """
        run = read_run_spec(folder.spec)
        forks = self._fork_server is not None and not run.python
        start = self._fork_server.start if forks and self._fork_server else start_launcher
        process = start(folder, environment)
        note_launcher(folder, process)
        return process

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        """Stop a launcher and its ranks."""
        return stop_launcher(process, grace_s)

    def sweep(self, folder: RunFolder) -> int:
        """Kill what ranks have started themselves."""
        return kill_leftovers(folder)

    def close(self) -> None:
        """End the fork server."""
        if self._fork_server is not None:
            self._fork_server.close()
