"""The launcher as a process: started afresh or forked from a warm one, stopped with a deadline."""

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

__all__ = ["kill_leftovers", "note_launcher", "start_launcher", "stop_launcher"]

MODULE = "zerotrial.process.launch"
"""Started as a process, never imported from here: torch lives there."""

_POLL_S = 0.02


def start_launcher(folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
    """Start a launcher from nothing, under the interpreter that the run wants.

    The kernel kills it when the calling *thread* ends, so that thread must outlive it.

    Args:
        folder: Of the run; holds the run spec.
        environment: Variables on top of ours.
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


def note_launcher(folder: RunFolder, process: LauncherProcess) -> None:
    """Write down which process launches a run, for an agent that comes after us."""
    write_json(folder.launcher, {"pid": process.pid})


def stop_launcher(process: LauncherProcess, grace_s: float) -> int:
    """Ask a launcher and its ranks to end, then kill what is left of them.

    Args:
        process: To stop; may have ended already.
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
    """Kill what still runs of a run whose launcher has ended; return how many processes.

    Ranks die with their launcher, but what they started themselves may not.
    """
    left = list(_processes_of(folder))
    kill_all(left)
    return len(left)


def _processes_of(folder: RunFolder) -> Iterator[psutil.Process]:
    """Find a run's processes by the run spec in their environment, or by the launcher's group.

    A forked rank has the environment of the process that it was forked from: there the group and
    the command line must both fit, since numbers of groups are used again.
    """
    noted = read_json(folder.launcher) or {}
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid():
                continue
            if os.getpgid(process.pid) == noted.get("pid"):
                if any(MODULE in word for word in process.cmdline()):
                    yield process
            elif process.environ().get(ENV_RUN_SPEC) == str(folder.spec):
                yield process
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
