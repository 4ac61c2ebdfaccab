"""Processes of custom searcher classes from model directories, one for each experiment.

A process has a token for the search routes of its experiment, a clean environment, one core and
limits on memory and CPU time. It ends with the server. If it exits before its experiment has ended,
it is restarted and receives all events. After several failures, or at once if the class is invalid,
the experiment fails with the last line of its output.
"""

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import msgspec
from sqlalchemy import Connection, select
from starlette.concurrency import run_in_threadpool

from zerolab.contract.spec import ENV_MASTER, ENV_TOKEN, EXIT_USER_ERROR
from zeroserver.orchestrator.search.search_service import DISABLED
from zeroserver.services import Services
from zeroserver.settings import Limits
from zeroserver.states import ExperimentState
from zeroserver.store.archives import archive_path, unpack_archive
from zeroserver.store.schema import experiments

__all__ = ["SearchProcesses"]

logger = logging.getLogger(__name__)

_MOST_FAILURES = 5
_PAUSE_S = 1.0
_LINE_CHARACTERS = 500
_FILE_BYTES = 256 * 1024**2
"""Maximum size of a file, including the output, that a searcher can write."""
_NICE = 10
_INHERITED = frozenset(
    {
        "HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SSL_CERT_DIR", "SSL_CERT_FILE",
        "TZ", "USER", "VIRTUAL_ENV",
    }
)  # fmt: skip
"""Environment variables that a searcher inherits, in addition to those of locale and Python."""
_INHERITED_PREFIXES = ("LC_", "PYTHON")
_CONFIG_KEYS = ("searcher", "hyperparameters", "reproducibility")


class _Searcher(msgspec.Struct):
    """Part of the key ``searcher`` of a configuration."""

    entrypoint: str | None = None


class _Config(msgspec.Struct):
    """Part of a configuration."""

    searcher: _Searcher


class _Process(msgspec.Struct):
    """Process of one searcher."""

    running: subprocess.Popen[bytes]
    folder: Path
    errors: IO[bytes]


class _Failures(msgspec.Struct):
    """Number of failures of a searcher's process, and the earliest next start."""

    count: int = 0
    next_at: float = 0.0


class SearchProcesses:
    """Supervisor of searcher processes; used only on the event loop's thread."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._running: dict[int, _Process] = {}
        self._failures: dict[int, _Failures] = {}
        self._folders = services.orchestrator.home.searchers
        # A killed server leaves its directories.
        shutil.rmtree(self._folders, ignore_errors=True)

    async def tick(self) -> None:
        """Start missing searcher processes and handle exited ones."""
        if not self.services.url:
            return  # the server is not reachable yet
        active = await self.services.read(_wanted)
        for experiment_id in list(self._running):
            await self._check_process(experiment_id, is_active=experiment_id in active)
        for experiment_id, (entrypoint, archive) in active.items():
            failures = self._failures.setdefault(experiment_id, _Failures())
            if experiment_id not in self._running and time.monotonic() >= failures.next_at:
                await self._start(experiment_id, entrypoint, archive)

    async def _start(self, experiment_id: int, entrypoint: str, archive: str) -> None:
        if not self.services.settings.custom_searchers:
            await self._end(experiment_id, DISABLED)
            return
        config = await self.services.read(lambda connection: _config_of(connection, experiment_id))
        self._folders.mkdir(mode=0o700, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{experiment_id}-", dir=self._folders))
        path = archive_path(self.services.orchestrator.home.archives, archive)
        model, temporary = folder / "model", folder / "tmp"
        for directory in (model, temporary):
            directory.mkdir()
        await run_in_threadpool(unpack_archive, path, model)
        config_file = folder / "config.json"
        config_file.write_text(json.dumps(config), encoding="utf-8")
        command = [
            sys.executable, "-P", "-m", "zerolab.client.search", str(experiment_id), entrypoint,
            str(os.getpid()), str(config_file),
        ]  # fmt: skip
        environment = _environment() | {
            ENV_MASTER: self.services.url,
            ENV_TOKEN: self.services.keys.search_token(experiment_id),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
        }
        errors = (folder / "errors").open("w+b")
        # Started on this thread, since the process gets a signal when its parent thread ends.
        running = subprocess.Popen(
            command, cwd=model, env=environment, stdin=subprocess.DEVNULL, stdout=errors,
            stderr=errors, start_new_session=True,
        )  # fmt: skip
        self._running[experiment_id] = _Process(running, folder, errors)
        _limit(running.pid, experiment_id, self.services.settings.limits)

    async def _check_process(self, experiment_id: int, *, is_active: bool) -> None:
        process = self._running[experiment_id]
        code = process.running.poll()
        if code is None and is_active:
            return
        if code is None:  # its experiment has ended; do not wait until it notices
            _signal_group(process, signal.SIGTERM)
            return
        process.errors.seek(max(0, process.errors.seek(0, 2) - 10_000))
        lines = process.errors.read().decode(errors="replace").strip().splitlines()
        self._forget(experiment_id)
        if not is_active:
            self._failures.pop(experiment_id, None)
            return
        if code != 0:
            await self._failed(experiment_id, code, lines[-1] if lines else "it said nothing")

    async def _failed(self, experiment_id: int, code: int, line: str) -> None:
        failures = self._failures[experiment_id]
        failures.count += 1
        failures.next_at = time.monotonic() + _PAUSE_S * 2 ** (failures.count - 1)
        logger.warning("the searcher of experiment %d ended: %s", experiment_id, line)
        if code == -signal.SIGXCPU:
            seconds = self.services.settings.limits.searcher_cpu_s
            line = (
                f"it used more than {seconds} s of processor time; make it faster, or start the "
                "server with a larger --searcher-cpu-seconds"
            )
        final = {EXIT_USER_ERROR, -signal.SIGXCPU}
        if code in final or failures.count >= _MOST_FAILURES:
            line = line[:_LINE_CHARACTERS]
            await self._end(experiment_id, f"searcher.entrypoint: its class failed: {line}")

    async def _end(self, experiment_id: int, error: str) -> None:
        await self.services.write(lambda work: work.experiments.fail(experiment_id, error))

    def close(self) -> None:
        """Stop all processes; the next server starts them again."""
        for process in self._running.values():
            _signal_group(process, signal.SIGKILL)
        for experiment_id in list(self._running):
            self._running[experiment_id].running.wait()
            self._forget(experiment_id)

    def _forget(self, experiment_id: int) -> None:
        process = self._running.pop(experiment_id)
        process.errors.close()
        _signal_group(process, signal.SIGKILL)  # children of the process
        shutil.rmtree(process.folder, ignore_errors=True)


def _signal_group(process: _Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.running.pid, number)


def _environment() -> dict[str, str]:
    """Return the environment of a searcher without the server's secrets, such as storage keys."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }


def _limit(pid: int, experiment_id: int, limits: Limits) -> None:
    """Set resource limits of a new process and its children."""
    soft_limits = {
        resource.RLIMIT_DATA: limits.searcher_memory_bytes,
        resource.RLIMIT_CPU: limits.searcher_cpu_s,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    with contextlib.suppress(ProcessLookupError):
        for kind, most in soft_limits.items():
            hard = resource.prlimit(pid, kind)[1]
            value = most if hard == resource.RLIM_INFINITY else min(most, hard)
            # With equal limits the kernel sends SIGKILL, which shows no reason.
            spare = 1 if kind == resource.RLIMIT_CPU and value != hard else 0
            resource.prlimit(pid, kind, (value, value + spare))
        cores = sorted(os.sched_getaffinity(pid))
        os.sched_setaffinity(pid, {cores[experiment_id % len(cores)]})
        os.setpriority(os.PRIO_PROCESS, pid, _NICE)


def _config_of(connection: Connection, experiment_id: int) -> dict[str, Any]:
    """Return the configuration and hyperparameters of a searcher."""
    query = select(experiments.c.config).where(experiments.c.id == experiment_id)
    config = json.loads(connection.execute(query).scalar_one())
    return {key: config[key] for key in _CONFIG_KEYS}


def _wanted(connection: Connection) -> dict[int, tuple[str, str]]:
    """Return the class and archive of each searcher that should run.

    Parsing the configurations of all open experiments after a start would hold the writer for
    seconds, so it reads only those of custom searches, and of these only the entrypoint.
    """
    columns = experiments.c
    query = select(columns.id, columns.archive, columns.config).where(
        columns.state.in_([ExperimentState.ACTIVE, ExperimentState.PAUSED]),
        columns.searcher_done == 0,
        columns.searcher_name == "custom",
        columns.archive.is_not(None),
    )
    searchers = {}
    for experiment_id, archive, config in connection.execute(query):
        entrypoint = msgspec.json.decode(config, type=_Config).searcher.entrypoint
        if entrypoint:
            searchers[experiment_id] = (entrypoint, archive)
    return searchers
