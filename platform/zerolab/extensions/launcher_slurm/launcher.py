"""Launcher of runs as jobs of Slurm; the agent offers the slots of a partition."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from zerolab.contract.messages import SlotInfo
from zerolab.contract.run_folder import RunFolder
from zerolab.extensions.launcher_slurm.follow import cancel_orphaned_job
from zerolab.extensions.launcher_slurm.job import check_installed
from zerolab.extensions.launcher_slurm.partition import nodes_ready, wait_for_partition
from zerolab.extensions.launcher_slurm.settings import ENV_SLURM, SlurmSettings, read_settings
from zerolab.files import append_private
from zerolab.launcher.interface import LauncherProcess
from zerolab.launcher.process import save_launcher_pid, stop_launcher
from zerolab.paths import Home

__all__ = ["SlurmLauncher"]

_LEAVE_S = 60.0
"""Minimum grace period of preempted jobs, in seconds: Slurm delivers signals slowly."""


class SlurmLauncher:
    """Launcher of runs as jobs of Slurm.

    Args:
        home: Data directory of the agent; all nodes of the cluster must see it.
        slots: Slots of one node of the default partition, used without settings.
        settings: Partition, options of sbatch and slots.
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
        """Create a launcher from a file; wait until Slurm responds.

        Args:
            home: Data directory of the agent.
            path: File with the block ``resource_manager``.

        Raises:
            ConfigError: With all problems of the file, or nodes that Slurm lacks.
        """
        settings = read_settings(path)
        check_installed()
        wait_for_partition(settings)
        return cls(home, settings.slots, settings)

    def keep_ready(self) -> None:
        """Do nothing: Slurm starts the ranks."""

    def offers(self) -> Sequence[SlotInfo]:
        """Return the slots; those of nodes that Slurm has lost or closed are down."""
        for folder in [*self._runs]:
            if folder.exit.exists() or not folder.path.exists():
                self._runs.remove(folder)
        ready = nodes_ready(self._settings, self._runs)
        self._ready = self._ready if ready is None else ready
        return self._settings.slots_on(self._ready)

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        """Submit a job, with a process that follows it.

        Slurm selects the devices of a rank, so the agent's variables are not passed on.
        """
        settings = msgspec.json.encode(self._settings).decode()
        command = [sys.executable, "-P", "-m", "zerolab.extensions.launcher_slurm.follow"]
        with append_private(folder.logs / "slurm.log") as log:
            process = subprocess.Popen(
                [*command, str(os.getpid()), str(folder.spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder.path,
                env={**os.environ, ENV_SLURM: settings},
                start_new_session=True,
            )
        save_launcher_pid(folder, process)
        self._runs.append(folder)
        return process

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        """Preempt the job's ranks, and cancel the job if they do not exit."""
        return stop_launcher(process, max(grace_s, _LEAVE_S) if grace_s > 0 else 0.0)

    def sweep(self, folder: RunFolder) -> int:
        """Cancel the job if it still exists."""
        return int(cancel_orphaned_job(folder))

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
