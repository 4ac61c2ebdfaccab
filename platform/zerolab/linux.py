"""What the kernel does for us: processes that die with their parent, trees killed, free ports."""

import contextlib
import ctypes
import os
import random
import signal
import socket
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

from zerolab.parent import die_with_parent

__all__ = [
    "PARENT_DIED",
    "die_with_parent",
    "free_port",
    "head_a_family",
    "is_in_memory",
    "kill_all",
    "kill_descendants",
    "kill_tree",
    "our_process",
    "reap_adopted",
    "sync_file_system",
    "usable_cores",
    "wait_for_end",
]

_PR_SET_CHILD_SUBREAPER = 36
PARENT_DIED = signal.Signals(signal.SIGRTMAX) if hasattr(signal, "SIGRTMAX") else signal.SIGTERM
"""Tells the head of a family that the process that has started it is gone."""
_WAIT_S = 10.0
_POLL_S = 0.01
_QUIET_PORTS = range(20_000, 32_000)
"""Linux gives outgoing connections those from 32768 on, unless it is told otherwise."""


def head_a_family(parent: int) -> None:
    """Let nothing that descends from this process outlive it, should its parent die.

    A descendant whose own parent ends becomes our child, in whatever session it is; when ``parent``
    ends, all of them are killed, and we with them. Elsewhere than on Linux it does nothing.

    Args:
        parent: As for :func:`die_with_parent`.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return
    signal.signal(PARENT_DIED, _die_out)
    die_with_parent(parent, PARENT_DIED)


def _die_out(_number: int, _frame: object) -> None:
    kill_descendants()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_descendants() -> None:
    """Kill all that descends from this process, also what is started meanwhile."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        found = psutil.Process().children(recursive=True)
        left = [one for one in found if _runs(one) and not _clears_up(one)]
        if not left:
            return
        for victim in left:
            with contextlib.suppress(psutil.Error):
                victim.kill()
        time.sleep(_POLL_S)


def _clears_up(process: psutil.Process) -> bool:
    """Whether it is Python's own, which gives shared memory back and ends with those who use it."""
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False


def reap_adopted(own: Collection[int]) -> None:
    """Clear away children that have ended, all but our own.

    Args:
        own: Process ids of the children that someone else here waits for.
    """
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def free_port() -> int:
    """Find a port that nobody listens on now; another may take it before it is used.

    It lies below those that the kernel gives to outgoing connections, of which a busy machine opens
    many in the meantime.
    """
    for port in random.SystemRandom().choices(_QUIET_PORTS, k=100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def usable_cores() -> int:
    """Count the CPU cores that this process may use: affinity mask and cgroup limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores or 1, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores or 1


def our_process(pid: int, word: str, not_after: float) -> psutil.Process | None:
    """Return the process that a file speaks of, if it still is the same one.

    Process ids are used again: what is found must have ``word`` in its command line, and must
    have been started before the file was written.

    Args:
        pid: As the file says.
        word: Something that every such process has in its command line.
        not_after: When the file was written, in seconds since 1970.
    """
    try:
        process = psutil.Process(pid)
        same = any(word in part for part in process.cmdline())
        # Start times count in clock ticks since boot: allow for the rounding.
        if _runs(process) and same and process.create_time() <= not_after + 2.0:
            return process
    except psutil.Error:
        pass
    return None


def kill_tree(pid: int) -> None:
    """Kill a process and all that descends from it, with SIGKILL, and wait until they are gone.

    Args:
        pid: Root of the tree; may be gone already.
    """
    doomed: list[psutil.Process] = []
    try:
        root = psutil.Process(pid)
        doomed.append(root)
        root.suspend()  # so that it starts nothing while we look
        doomed += root.children(recursive=True)
    except psutil.Error:
        pass
    kill_all(doomed)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes with SIGKILL, and wait until they run no more.

    Children of ours are left to be waited for by whoever started them.
    """
    doomed = list(processes)
    for victim in doomed:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    wait_for_end(doomed, _WAIT_S)


def wait_for_end(processes: Iterable[psutil.Process], timeout_s: float) -> bool:
    """Wait until processes run no more; one that its parent has not waited for has ended too.

    Returns:
        Whether all of them have ended in time.
    """
    deadline = time.monotonic() + timeout_s
    for process in processes:
        while _runs(process):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_in_memory(path: Path) -> bool:
    """Whether the file system of ``path`` is one in memory; not where that cannot be told."""
    place = path.resolve()
    try:
        mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    except OSError:
        return False
    of = next((one for one in (place, *place.parents) if one in mounts), None)
    return of is not None and mounts[of] in {"tmpfs", "ramfs"}


def sync_file_system(path: Path) -> None:
    """Have everything on the file system of ``path`` reach its disk.

    Raises:
        OSError: If it does not.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(handle):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    except AttributeError:  # elsewhere than on Linux
        os.sync()
    finally:
        os.close(handle)
