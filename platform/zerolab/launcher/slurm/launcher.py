"""Ranks in jobs of Slurm: the agent offers the slots of a partition, and each run is a job."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from zerolab.contract.messages import SlotInfo
from zerolab.contract.run_folder import RunFolder
from zerolab.files import append_private
from zerolab.launcher.interface import LauncherProcess
from zerolab.launcher.process import note_launcher, stop_launcher
from zerolab.launcher.slurm.follow import cancel_job_of
from zerolab.launcher.slurm.job import check_installed
from zerolab.launcher.slurm.partition import await_partition, nodes_ready
from zerolab.launcher.slurm.settings import ENV_SLURM, SlurmSettings, read_settings
from zerolab.paths import Home

__all__ = ["SlurmLauncher"]

_LEAVE_S = 60.0
"""Jobs have at least so long to leave, in seconds: Slurm passes signals on slowly."""


class SlurmLauncher:
    """See :class:`~zerolab.launcher.interface.Launcher`.

    Args:
        home: Data directory of the agent; all nodes of the cluster must see it.
        slots: Without settings, those of one node of the default partition.
        settings: How runs become jobs, and which slots there are.
    """

    def __init__(
        self, home: Home, slots: Sequence[SlotInfo], settings: SlurmSettings | None = None
    ) -> None:
        check_installed()
        if settings is None:
            cuda = any(slot.device.startswith("cuda") for slot in slots)
            settings = SlurmSettings(slots_per_node=len(slots), slot_type="cuda" if cuda else "cpu")
        self._settings = settings
        self._ready: int | None = None
        self._runs: list[RunFolder] = []

    @classmethod
    def from_file(cls, home: Home, path: Path) -> Self:
        """Make it for what a file says; wait until Slurm answers.

        Args:
            home: Data directory of the agent.
            path: With the block ``resource_manager``.

        Raises:
            ConfigError: With everything that is wrong with it, or that Slurm does not have.
        """
        settings = read_settings(path)
        check_installed()
        await_partition(settings)
        return cls(home, settings.slots, settings)

    def keep_ready(self) -> None:
        """Nothing is kept: Slurm starts the ranks."""

    def offers(self) -> Sequence[SlotInfo]:
        """Return the slots: those of nodes that Slurm has lost or closed are down."""
        for folder in [*self._runs]:
            if folder.exit.exists() or not folder.path.exists():
                self._runs.remove(folder)
        ready = nodes_ready(self._settings, self._runs)
        self._ready = self._ready if ready is None else ready
        return self._settings.slots_on(self._ready)

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        """Submit a job, and follow it by a process.

        Slurm says which devices a rank sees, so that of the agent's variables none is handed on.
        """
        settings = msgspec.json.encode(self._settings).decode()
        words = [sys.executable, "-P", "-m", "zerolab.launcher.slurm.follow"]
        with append_private(folder.logs / "slurm.log") as log:
            process = subprocess.Popen(
                [*words, str(os.getpid()), str(folder.spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder.path,
                env={**os.environ, ENV_SLURM: settings},
                start_new_session=True,
            )
        note_launcher(folder, process)
        self._runs.append(folder)
        return process

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        """Have the job's ranks leave, and cancel it when they do not."""
        return stop_launcher(process, max(grace_s, _LEAVE_S) if grace_s > 0 else 0.0)

    def sweep(self, folder: RunFolder) -> int:
        """Cancel the job, if it is still there."""
        return int(cancel_job_of(folder))

    def close(self) -> None:
        """There is nothing to give back."""
