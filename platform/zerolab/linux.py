"""Linux features: processes that die with their parent, killing of trees, free ports."""

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
    "is_in_memory",
    "kill_all",
    "kill_descendants",
    "kill_tree",
    "our_process",
    "own_process_tree",
    "reap_adopted",
    "sync_file_system",
    "usable_cores",
    "wait_for_end",
]

_PR_SET_CHILD_SUBREAPER = 36
PARENT_DIED = signal.Signals(signal.SIGRTMAX) if hasattr(signal, "SIGRTMAX") else signal.SIGTERM
"""Signal for the root of a process tree when its parent has died."""
_WAIT_S = 10.0
_POLL_S = 0.01
_QUIET_PORTS = range(20_000, 32_000)
"""Ports below 32768, from which Linux assigns ports to outgoing connections by default."""


def own_process_tree(parent: int) -> None:
    """Let all descendants of this process die with it if its parent dies.

    A descendant whose parent ends becomes a child of this process, in any session. When ``parent``
    ends, all of them are killed, and this process, too. On other systems than Linux it does
    nothing.

    Args:
        parent: As for :func:`die_with_parent`.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return
    signal.signal(PARENT_DIED, _die_with_descendants)
    die_with_parent(parent, PARENT_DIED)


def _die_with_descendants(_number: int, _frame: object) -> None:
    kill_descendants()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_descendants() -> None:
    """Kill all descendants of this process, including new ones."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        children = psutil.Process().children(recursive=True)
        running = [
            process
            for process in children
            if _is_running(process) and not _is_resource_tracker(process)
        ]
        if not running:
            return
        for victim in running:
            with contextlib.suppress(psutil.Error):
                victim.kill()
        time.sleep(_POLL_S)


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether it is Python's resource tracker, which ends by itself."""
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False


def reap_adopted(awaited: Collection[int]) -> None:
    """Reap adopted children that have ended.

    Args:
        awaited: Process ids of children that other code in this process waits for.
    """
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.pid not in awaited and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def free_port() -> int:
    """Find a free port; another process may take it before it is used.

    It is below the ports that the kernel assigns to outgoing connections, of which a busy machine
    opens many.
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
    """Return the process whose id a file contains, if it is still the same one.

    The system reuses process ids: the process must have ``word`` in its command line, and must have
    started before the file was written.

    Args:
        pid: Process id in the file.
        word: Text in the command line of every such process.
        not_after: Time at which the file was written, in seconds since 1970.
    """
    try:
        process = psutil.Process(pid)
        same = any(word in part for part in process.cmdline())
        # Start times count in clock ticks since boot: allow for the rounding.
        if _is_running(process) and same and process.create_time() <= not_after + 2.0:
            return process
    except psutil.Error:
        pass
    return None


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants with SIGKILL, and wait for their end.

    Args:
        pid: Root of the tree; may have ended.
    """
    doomed: list[psutil.Process] = []
    try:
        root = psutil.Process(pid)
        doomed.append(root)
        root.suspend()  # so that it starts nothing while its descendants are listed
        doomed += root.children(recursive=True)
    except psutil.Error:
        pass
    kill_all(doomed)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes with SIGKILL, and wait for their end.

    Children of this process are not reaped: the code that started them waits for them.
    """
    doomed = list(processes)
    for victim in doomed:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    wait_for_end(doomed, _WAIT_S)


def wait_for_end(processes: Iterable[psutil.Process], timeout_s: float) -> bool:
    """Wait until processes have ended; a zombie has ended, too.

    Returns:
        Whether all have ended in time.
    """
    deadline = time.monotonic() + timeout_s
    for process in processes:
        while _is_running(process):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
    return True


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_in_memory(path: Path) -> bool:
    """Return whether a path is on a file system in memory; False if unknown."""
    resolved = path.resolve()
    try:
        mounts = {
            Path(partition.mountpoint): partition.fstype
            for partition in psutil.disk_partitions(all=True)
        }
    except OSError:
        return False
    mount_point = next(
        (partition for partition in (resolved, *resolved.parents) if partition in mounts), None
    )
    return mount_point is not None and mounts[mount_point] in {"tmpfs", "ramfs"}


def sync_file_system(path: Path) -> None:
    """Flush the file system of ``path`` to its disk.

    Raises:
        OSError: If that fails.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(handle):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    except AttributeError:  # not on Linux
        os.sync()
    finally:
        os.close(handle)
