"""Interface of launchers."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from zerolab.contract.messages import SlotInfo
from zerolab.contract.run_folder import RunFolder
from zerolab.paths import Home

__all__ = ["Launcher", "LauncherFactory", "LauncherProcess"]


class LauncherProcess(Protocol):
    """Process of a started run, such as ``subprocess.Popen``."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, -n for signal n, or None while it runs."""


class Launcher(Protocol):
    """Starts and stops the ranks of runs; an agent has one.

    The ranks of a run exist from :meth:`start` until its process has ended. The process writes the
    outcome into the run's directory (:func:`zerolab.contract.outcome.write_outcome`); a process
    without an outcome has failed, for any exit code.
    """

    def keep_ready(self) -> None:
        """Prepare for future runs; called every second, by the thread that outlives all runs."""
        ...

    def offers(self) -> Sequence[SlotInfo]:
        """Return the current slots of its agent; called every five seconds, may block."""
        ...

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        """Start the ranks of a run.

        Args:
            folder: Directory of the run, with the run specification.
            environment: Variables in addition to the agent's.
        """
        ...

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        """Stop the ranks of a run, and kill the remaining ones after a grace period.

        Args:
            process: From :meth:`start`; may have ended already.
            grace_s: Grace period in seconds.

        Returns:
            Exit code of the process, -n for signal n.
        """
        ...

    def sweep(self, folder: RunFolder) -> int:
        """Kill remaining processes of a run whose process has ended; return their number."""
        ...

    def close(self) -> None:
        """Release the resources of :meth:`keep_ready`. No run continues after this."""
        ...


class LauncherFactory(Protocol):
    """Factory of launchers."""

    def __call__(self, home: Home, slots: Sequence[SlotInfo]) -> Launcher:
        """Create the launcher of an agent.

        Args:
            home: Data directory of the agent.
            slots: Slots of the agent.
        """
        ...
