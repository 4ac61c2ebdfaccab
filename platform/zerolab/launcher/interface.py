"""The one face of all launchers."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from zerolab.contract.messages import SlotInfo
from zerolab.contract.run_folder import RunFolder
from zerolab.paths import Home

__all__ = ["Launcher", "LauncherProcess", "MakeLauncher"]


class LauncherProcess(Protocol):
    """What has been started for a run; ``subprocess.Popen`` is one."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit code, -n for signal n, or None while it runs."""


class Launcher(Protocol):
    """Starts the ranks of runs, and ends them. An agent has one.

    The ranks of a run are there from :meth:`start` until its process has ended. How the run ended
    stands in its folder then (:func:`zerolab.contract.outcome.write_outcome`); a process that ends
    without it has failed, whatever its exit code.
    """

    def keep_ready(self) -> None:
        """Prepare for runs to come; called every second, by the thread that outlives all runs."""
        ...

    def offers(self) -> Sequence[SlotInfo]:
        """Return the slots of its agent as they are now; asked every five seconds, and may wait."""
        ...

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        """Start the ranks of a run.

        Args:
            folder: Of the run; holds the run spec.
            environment: Variables on top of the agent's.
        """
        ...

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        """Ask the ranks of a run to end, then kill what is left of them.

        Args:
            process: From :meth:`start`; may have ended already.
            grace_s: Seconds that they have.

        Returns:
            Exit code of the process, -n for signal n.
        """
        ...

    def sweep(self, folder: RunFolder) -> int:
        """Kill what still runs of a run whose process has ended; return how many processes."""
        ...

    def close(self) -> None:
        """Give back what :meth:`keep_ready` has taken. No run goes on after this."""
        ...


class MakeLauncher(Protocol):
    """Makes a launcher for an agent."""

    def __call__(self, home: Home, slots: Sequence[SlotInfo]) -> Launcher:
        """Make it.

        Args:
            home: Data directory of the agent.
            slots: That it offers.
        """
        ...
