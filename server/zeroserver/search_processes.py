"""Searchers of users' own in model directories: a process beside the server for each of them.

A process dies with the server. One that ends by itself before its experiment has ended is started
again, and told everything anew; after some failures, or at once when the class cannot work, the
experiment ends with its last line.
"""

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from zerolab.contract.spec import ENV_MASTER, ENV_TOKEN, EXIT_USER_ERROR
from zeroserver.orchestrator.desk import World
from zeroserver.orchestrator.trials import fail_experiment
from zeroserver.services import Services
from zeroserver.states import ExperimentState
from zeroserver.store.archives import archive_path, unpack_archive
from zeroserver.store.database import Transaction
from zeroserver.store.schema import experiments

__all__ = ["SearchProcesses"]

logger = logging.getLogger(__name__)

_MOST_FAILURES = 5
_PAUSE_S = 1.0
_LINE_CHARACTERS = 500


@dataclass
class _Process:
    """One searcher's process."""

    running: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]
    errors: IO[bytes]


@dataclass
class _Failures:
    """How often a searcher's process has failed, and when the next one may start."""

    count: int = 0
    next_at: float = 0.0


@dataclass
class SearchProcesses:
    """Starts what should run, and looks after it; for the event loop's thread alone."""

    services: Services
    _running: dict[int, _Process] = field(default_factory=dict)
    _failures: dict[int, _Failures] = field(default_factory=dict)

    async def look_after(self) -> None:
        """Start the searchers that should run, and see which have ended."""
        if not self.services.url:
            return  # nobody could reach us
        wanted = await self.services.write(_wanted)
        for experiment_id in list(self._running):
            await self._look_at(experiment_id, wanted=experiment_id in wanted)
        for experiment_id, (entrypoint, archive) in wanted.items():
            failures = self._failures.setdefault(experiment_id, _Failures())
            if experiment_id not in self._running and time.monotonic() >= failures.next_at:
                await self._start(experiment_id, entrypoint, archive)

    async def _start(self, experiment_id: int, entrypoint: str, archive: str) -> None:
        folder = tempfile.TemporaryDirectory(prefix=f"zerolab-search-{experiment_id}-")
        path = archive_path(self.services.world.home.archives, archive)
        model = Path(folder.name) / "model"
        model.mkdir()
        await run_in_threadpool(unpack_archive, path, model)
        environment = os.environ | {
            ENV_MASTER: self.services.url,
            ENV_TOKEN: self.services.keys.token,
        }
        words = [
            sys.executable, "-P", "-m", "zerolab.client.search", str(experiment_id), entrypoint,
            str(os.getpid()),
        ]  # fmt: skip
        errors = (Path(folder.name) / "errors").open("w+b")
        # From this thread: the process is told to end when the thread that started it does.
        running = subprocess.Popen(
            words, cwd=model, env=environment, stdin=subprocess.DEVNULL, stdout=errors,
            stderr=errors,
        )  # fmt: skip
        self._running[experiment_id] = _Process(running, folder, errors)

    async def _look_at(self, experiment_id: int, *, wanted: bool) -> None:
        process = self._running[experiment_id]
        code = process.running.poll()
        if code is None and wanted:
            return
        if code is None:  # its experiment has ended: it sees that soon, but need not be waited for
            process.running.terminate()
            return
        process.errors.seek(max(0, process.errors.seek(0, 2) - 10_000))
        lines = process.errors.read().decode(errors="replace").strip().splitlines()
        self._forget(experiment_id)
        if not wanted:
            self._failures.pop(experiment_id, None)
            return
        if code != 0:
            await self._failed(experiment_id, code, lines[-1] if lines else "it said nothing")

    async def _failed(self, experiment_id: int, code: int, line: str) -> None:
        failures = self._failures[experiment_id]
        failures.count += 1
        failures.next_at = time.monotonic() + _PAUSE_S * 2 ** (failures.count - 1)
        logger.warning("the searcher of experiment %d ended: %s", experiment_id, line)
        if code == EXIT_USER_ERROR or failures.count >= _MOST_FAILURES:
            error = f"searcher.entrypoint: its class failed: {line[:_LINE_CHARACTERS]}"
            await self.services.write(
                lambda world, transaction: fail_experiment(world, transaction, experiment_id, error)
            )

    def close(self) -> None:
        """End all processes; the next server starts them again."""
        for process in self._running.values():
            process.running.kill()
        for experiment_id in list(self._running):
            self._running[experiment_id].running.wait()
            self._forget(experiment_id)

    def _forget(self, experiment_id: int) -> None:
        process = self._running.pop(experiment_id)
        process.errors.close()
        with contextlib.suppress(OSError):
            process.folder.cleanup()


def _wanted(world: World, transaction: Transaction) -> dict[int, tuple[str, str]]:
    """Return the searchers that should run: their classes, and the archives that hold them."""
    open_states = [ExperimentState.ACTIVE, ExperimentState.PAUSED]
    query = select(experiments.c.id, experiments.c.archive).where(
        experiments.c.state.in_(open_states), experiments.c.searcher_done == 0
    )
    found = {}
    for experiment_id, archive in transaction.connection.execute(query).all():
        entrypoint = world.config(transaction, experiment_id).searcher.runs_beside
        if entrypoint and archive:
            found[experiment_id] = (entrypoint, archive)
    return found
