"""Kernel settings of a process: its name, death with its parent, no inspection by others.

It is separate from :mod:`zerolab.linux` because processes of every trial use it and it imports
little.
"""

import contextlib
import ctypes
import os
import signal

__all__ = ["die_with_parent", "forbid_inspection", "name_process"]

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15


def die_with_parent(parent: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the thread that started it ends.

    It holds across ``exec``. On other systems than Linux it does nothing.

    Args:
        parent: Process id of the parent at the start of this process. If the parent has changed, it
        has died, and this process ends immediately.
        with_signal: Signal to send.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)


def forbid_inspection() -> None:
    """Prevent other processes of this user from reading this one's memory, files and environment.

    It lasts until the next exec, so child programs are not protected. Root can still read
    everything. On other systems than Linux it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def name_process(name: str) -> None:
    """Set the name of this process that ``top`` and ``ps -o comm`` show, until the next exec.

    On other systems than Linux it does nothing.

    Args:
        name: The name; the kernel keeps its first 15 bytes.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
