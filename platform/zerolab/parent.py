"""Settings of a process in the kernel: it dies with its parent, others cannot inspect it.

It stands apart from :mod:`zerolab.linux` for what is started for every trial: this imports little.
"""

import contextlib
import ctypes
import os
import signal

__all__ = ["die_with_parent", "forbid_inspection"]

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


def die_with_parent(parent: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the thread that started it ends.

    It holds across ``exec``. Elsewhere than on Linux it does nothing.

    Args:
        parent: Process id of the parent as this process was started; when it is another one by
            now, the parent is gone already, and so is this process.
        with_signal: What to send.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)


def forbid_inspection() -> None:
    """Keep other processes of this user from reading our memory, files and environment.

    It lasts until the next exec, so what we start is not protected. Root may still read everything.
    Elsewhere than on Linux it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
