"""Guardian that kills the processes of tests, even if pytest itself is killed.

``watch`` marks all later child processes with an inherited environment variable, and starts a
watcher process. When pytest ends, the kernel signals the watcher, which kills all marked
processes: ranks, servers with their own session, launchers, browsers, databases.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from zerolab.linux import die_with_parent, kill_all

__all__ = ["watch"]

_MARK = "PYTEST_PROCESS_OF"
_ROUNDS = 100  # killed processes may have started others in the meantime


def watch() -> Callable[[], None]:
    """Kill all later child processes when this process ends.

    Returns:
        Function that kills the remaining processes and stops the watcher.
    """
    mark = f"{os.getpid()} {psutil.Process().create_time()}"
    environment = {name: value for name, value in os.environ.items() if name != _MARK}
    watcher = subprocess.Popen(
        [sys.executable, "-m", "tests.guardian", str(os.getpid()), mark],
        cwd=Path(__file__).parents[1],
        env=environment,  # unmarked: the watcher must not kill itself
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must not reach it
    )
    os.environ[_MARK] = mark

    def end() -> None:
        watcher.terminate()
        watcher.wait()

    return end


def main(parent: int, mark: str) -> None:
    """Wait for the end of ``parent`` or SIGTERM, then kill processes with ``mark``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_parent(parent, signal.SIGTERM)
    signal.sigwait({signal.SIGTERM})
    for _ in range(_ROUNDS):
        remaining = list(_marked(mark))
        if not remaining:
            break
        kill_all(remaining)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
