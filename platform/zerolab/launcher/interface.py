"""Interface of launchers."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from zerolab.contract.messages import SlotInfo
from zerolab.contract.run_folder import RunFolder
from zerolab.paths import Home

__all__ = ["Launcher", "LauncherFactory", "LauncherProcess"]


class LauncherProcess(Protocol):
    """Process of a started run, such as ``subprocess.Popen``.

    Example:
        >>> import subprocess, sys
        >>> process = subprocess.Popen([sys.executable, "-c", "pass"])
        >>> process.wait(), process.poll()
        (0, 0)
    """

    pid: int

    def poll(self) -> int | None:
        """Return the exit code if the process has ended.

        Returns:
            Exit code, -n for signal n; None while it runs.
        """


class Launcher(Protocol):
    """Starts and stops the ranks of runs; an agent has one.

    The ranks of a run exist from :meth:`start` until its process has ended. The process writes the
    outcome into the run's directory (:func:`zerolab.contract.outcome.write_outcome`); a process
    without an outcome has failed, for any exit code.

    Example:
        >>> import subprocess, sys
        >>> class OneProcess:
        ...     def __init__(self, home, slots):
        ...         self.slots = slots
        ...     def keep_ready(self):
        ...         pass
        ...     def offers(self):
        ...         return self.slots
        ...     def start(self, folder, environment):
        ...         command = [sys.executable, "-m", "my_runner", str(folder.path)]
        ...         return subprocess.Popen(command, env=environment, start_new_session=True)
        ...     def stop(self, process, grace_s):
        ...         process.terminate()
        ...         return process.wait(grace_s)
        ...     def sweep(self, folder):
        ...         return 0
        ...     def close(self):
        ...         pass
    """

    def keep_ready(self) -> None:
        """Prepare for future runs; must return quickly.

        Called every second, by the thread that outlives all runs.
        """
        ...

    def offers(self) -> Sequence[SlotInfo]:
        """Return the current slots of its agent.

        Called every five seconds; may block.

        Returns:
            The slots, in the order of their numbers.
        """
        ...

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        """Start the ranks of a run.

        Args:
            folder: Directory of the run, with the run specification.
            environment: Variables in addition to the agent's.

        Returns:
            The process of the run; it ends when all ranks have ended.
        """
        ...

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        """Stop the ranks of a run.

        Remaining ranks are killed after a grace period.

        Args:
            process: From :meth:`start`; may have ended already.
            grace_s: Grace period in seconds.

        Returns:
            Exit code of the process, -n for signal n.
        """
        ...

    def sweep(self, folder: RunFolder) -> int:
        """Kill remaining processes of a run whose process has ended.

        Args:
            folder: Directory of the run.

        Returns:
            Number of killed processes.
        """
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
