"""Ranks on the machines of a hostfile: a head on the agent's machine starts them over ssh."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from zerolab.contract.messages import SlotInfo
from zerolab.contract.run_folder import RunFolder
from zerolab.files import append_private
from zerolab.launcher.interface import LauncherProcess
from zerolab.launcher.process import kill_leftovers, note_launcher, stop_launcher
from zerolab.paths import Home

__all__ = ["SshLauncher"]

_HEAD = "zerolab.launcher.nodes.follow"


class SshLauncher:
    """See :class:`~zerolab.launcher.interface.Launcher`.

    Args:
        home: Data directory of the agent.
        slots: That it offers; a run takes one, and those of its machines besides.
    """

    def __init__(self, home: Home, slots: Sequence[SlotInfo]) -> None:
        self._slots = slots

    def keep_ready(self) -> None:
        """Nothing is kept: each machine starts its own ranks."""

    def offers(self) -> Sequence[SlotInfo]:
        """Return the slots, which are always there."""
        return self._slots

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        """Start a head; its machines have threads and devices of their own."""
        with append_private(folder.launcher_log) as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _HEAD, str(os.getpid()), str(folder.spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder.path,
                start_new_session=True,
            )
        note_launcher(folder, process)
        return process

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        """Stop the head; with it ends all that it has started on the machines."""
        return stop_launcher(process, grace_s)

    def sweep(self, folder: RunFolder) -> int:
        """Kill what the head has started on this machine."""
        return kill_leftovers(folder)

    def close(self) -> None:
        """There is nothing to give back."""
