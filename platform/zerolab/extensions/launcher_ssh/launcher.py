"""Launcher of ranks on the machines of a hostfile, through a coordinator process and ssh."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from zerolab.contract.messages import SlotInfo
from zerolab.contract.run_folder import RunFolder
from zerolab.files import append_private
from zerolab.launcher.interface import LauncherProcess
from zerolab.launcher.process import kill_leftovers, save_launcher_pid, stop_launcher
from zerolab.paths import Home

__all__ = ["SshLauncher"]

_COORDINATOR = "zerolab.extensions.launcher_ssh.follow"


class SshLauncher:
    """Launcher of ranks on the machines of a hostfile.

    Args:
        home: Data directory of the agent.
        slots: Slots of the agent; a run takes one of them, in addition to the slots of its
            machines.
    """

    def __init__(self, home: Home, slots: Sequence[SlotInfo]) -> None:
        self._slots = slots

    def keep_ready(self) -> None:
        """Do nothing: each machine starts its ranks."""

    def offers(self) -> Sequence[SlotInfo]:
        """Return the slots, which never change."""
        return self._slots

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        """Start a coordinator; the variables for threads and devices are its machines'."""
        with append_private(folder.launcher_log) as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _COORDINATOR, str(os.getpid()), str(folder.spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder.path,
                start_new_session=True,
            )
        save_launcher_pid(folder, process)
        return process

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        """Stop the coordinator and everything that it started on the machines."""
        return stop_launcher(process, grace_s)

    def sweep(self, folder: RunFolder) -> int:
        """Kill the remaining processes of the coordinator on this machine."""
        return kill_leftovers(folder)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
