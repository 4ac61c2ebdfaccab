"""What tests have started ends with them, however they end: also when pytest itself is killed.

``watch`` marks everything that this process starts from now on, by a variable that is handed down,
and starts a process that looks on. When this process ends, in whatever way, the kernel tells the
onlooker, which kills all that carries the mark: ranks, servers that have a session of their own,
their launchers, browsers, databases.
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
_ROUNDS = 100  # of killing, as what is killed may have started something in the meantime


def watch() -> Callable[[], None]:
    """Have everything end with this process that it starts from now on.

    Returns:
        Ends what is left now, and the watch.
    """
    mark = f"{os.getpid()} {psutil.Process().create_time()}"
    environment = {name: value for name, value in os.environ.items() if name != _MARK}
    onlooker = subprocess.Popen(
        [sys.executable, "-m", "tests.guardian", str(os.getpid()), mark],
        cwd=Path(__file__).parents[1],
        env=environment,  # unmarked: nobody kills the one that kills
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for others
    )
    os.environ[_MARK] = mark

    def end() -> None:
        onlooker.terminate()
        onlooker.wait()

    return end


def main(parent: int, mark: str) -> None:
    """Wait for the end of ``parent``, or to be told, and kill what carries ``mark``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_parent(parent, signal.SIGTERM)
    signal.sigwait({signal.SIGTERM})
    for _ in range(_ROUNDS):
        left = list(_marked(mark))
        if not left:
            break
        kill_all(left)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
