"""Launcher processes: start, stop with a deadline, cleanup."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

import psutil

from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import ENV_RUN_SPEC, read_run_spec
from zerolab.files import append_private, read_json, write_json
from zerolab.launcher.interface import LauncherProcess
from zerolab.launcher.interpreter import find_interpreter
from zerolab.linux import kill_all, kill_tree

__all__ = ["kill_leftovers", "save_launcher_pid", "start_launcher", "stop_launcher"]

MODULE = "zerotrial.process.launch"
"""Started as a process, never imported here, because it imports torch."""

_POLL_S = 0.02


def start_launcher(folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
    """Start a launcher as a new process, under the run's interpreter.

    The kernel kills it when the calling *thread* ends, so that thread must outlive it.

    Args:
        folder: Directory of the run, with the run specification.
        environment: Variables in addition to this process's.
    """
    named = read_run_spec(folder.spec).python
    python = str(find_interpreter(named)) if named else sys.executable
    with append_private(folder.launcher_log) as log:
        return subprocess.Popen(
            [python, "-P", "-m", MODULE, str(os.getpid()), str(folder.spec)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder.path,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def save_launcher_pid(folder: RunFolder, process: LauncherProcess) -> None:
    """Save the process of a run's launcher, for the next agent."""
    write_json(folder.launcher, {"pid": process.pid})


def stop_launcher(process: LauncherProcess, grace_s: float) -> int:
    """Stop a launcher and its ranks, and kill the remaining ones after a grace period.

    Args:
        process: The launcher; may have ended already.
        grace_s: Seconds between SIGTERM and SIGKILL.

    Returns:
        Exit code of the launcher, -n for signal n.
    """
    deadline = time.monotonic() + grace_s
    code = process.poll()
    if code is None:
        try:
            os.kill(process.pid, signal.SIGTERM)
        except ProcessLookupError:
            deadline = 0.0
    while code is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        code = process.poll()
    if code is None:
        kill_tree(process.pid)
    while code is None:
        time.sleep(_POLL_S)
        code = process.poll()
    return code


def kill_leftovers(folder: RunFolder) -> int:
    """Kill remaining processes of a run whose launcher has ended; return their number.

    Ranks die with their launcher, but their child processes may not.
    """
    processes = list(_processes_of(folder))
    kill_all(processes)
    return len(processes)


def _processes_of(folder: RunFolder) -> Iterator[psutil.Process]:
    """Find a run's processes by their environment, or by the launcher's group.

    A forked rank has the environment of the fork server. Its group and its command line must both
    match, because the system reuses the numbers of groups.
    """
    saved = read_json(folder.launcher) or {}
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid():
                continue
            if os.getpgid(process.pid) == saved.get("pid"):
                if any(MODULE in word for word in process.cmdline()):
                    yield process
            elif process.environ().get(ENV_RUN_SPEC) == str(folder.spec):
                yield process
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
