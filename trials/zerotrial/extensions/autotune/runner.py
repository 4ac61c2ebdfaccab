"""Runs of candidates in separate processes; every end of a run is a result."""

import contextlib
import os
import re
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

from zerolab.agent.run import run_environment
from zerolab.contract.messages import SlotInfo
from zerolab.contract.outcome import read_outcome, read_reason, tail
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import ENV_AS_DEEPSPEED, write_run_spec
from zerolab.errors import TrialError
from zerolab.formatting import size_text
from zerolab.launcher.local import ForkServer
from zerolab.launcher.process import (
    kill_leftovers,
    save_launcher_pid,
    start_launcher,
    stop_launcher,
)
from zerotrial.extensions.autotune.candidates import Candidate, Profile
from zerotrial.extensions.autotune.exchange import Measurement, Request, RunFiles
from zerotrial.extensions.autotune.search import Result
from zerotrial.extensions.autotune.subjects import Subject

__all__ = ["Runner", "is_out_of_memory"]

_ENV_AUTOTUNE = "ZEROLAB_AUTOTUNE"  # zerotrial.engine.builder.environment, which imports torch
_POLL_S = 0.02
_GRACE_S = 3.0
_EXIT_S = 10.0
"""Time of a run to end after a rank has reported its failure."""
_TAIL_LINES = 200
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|can't allocate memory|Cannot allocate memory"
    r"|bad_alloc|can't start new thread|Thread creation failed|Unable to allocate",
    re.IGNORECASE,
)
_KILLED = -9
_STEP_S = 0.05
"""Minimum duration of a measured step on average; shorter ones are measured more often."""


class Runner:
    """Runs a subject with the settings of candidates, one after the other, on this machine.

    Args:
        subject: What runs.
        slots: Slots of this machine that the ranks use, one each.
        directory: Directory for the runs; each is deleted after its end.
        clock: Clock of the steps.
        warmup: Steps before the measured ones.
        timeout_s: Duration after which a run is stopped, seconds.
        as_deepspeed: Let ``import deepspeed`` import this engine.
    """

    def __init__(
        self,
        subject: Subject,
        slots: Sequence[SlotInfo],
        directory: Path,
        *,
        clock: Literal["wall", "cpu"] = "wall",
        warmup: int = 2,
        timeout_s: float = 600.0,
        as_deepspeed: bool = False,
    ) -> None:
        self._subject = subject
        self._slots = slots
        self._directory = directory
        self._clock: Literal["wall", "cpu"] = clock
        self._warmup = warmup
        self._timeout_s = timeout_s
        self._environment = run_environment(slots, [slot.id for slot in slots])
        if threads := os.environ.get("OMP_NUM_THREADS"):
            self._environment["OMP_NUM_THREADS"] = threads
        if as_deepspeed:
            self._environment[ENV_AS_DEEPSPEED] = "1"
        self._number = 0
        self._fork_server: ForkServer | None = None
        if subject.forks and all(slot.device == "cpu" for slot in slots):
            # Saves the import of torch, which takes longer than some measurements.
            self._fork_server = ForkServer(directory / "fork_server.log")

    def close(self) -> None:
        """End the process that the runs are forked from."""
        if self._fork_server is not None:
            self._fork_server.close()

    def profile(self) -> Profile:
        """Run the subject until it builds its engine, and return the sizes of its model.

        Raises:
            TrialError: If it builds no engine.
        """
        files, _, reason = self._run(Request(), {})
        profile = files.read_profile()
        self._remove(files)
        if profile is None:
            cause = reason or "it ended without a call of zerotrial.initialize"
            raise TrialError(f"{self._subject.source}: its model cannot be profiled: {cause}")
        return profile

    def measure(
        self,
        candidate: Candidate,
        data_ranks: int,
        steps: int,
        limit_s: float | None,
        memory_bytes: int | None,
    ) -> Result:
        """Run a candidate.

        Args:
            candidate: Settings.
            data_ranks: Data-parallel ranks.
            steps: Measured steps.
            limit_s: Seconds per step at which the run stops early.
            memory_bytes: Memory that a rank may use; None for no limit.

        Raises:
            TrialError: If the engine does not get the settings.
        """
        overrides = candidate.overrides(data_ranks)
        request = Request(
            candidate,
            overrides,
            self._subject.override_engine,
            self._warmup,
            steps,
            steps * _STEP_S,
            limit_s,
            self._clock,
            memory_bytes,
        )
        began, used = time.monotonic(), self._cpu_s()
        files, code, reason = self._run(request, overrides)
        seconds, cpu_seconds = time.monotonic() - began, self._cpu_s() - used
        measurements = files.read_measurements()
        text = self._errors(files)
        self._remove(files)
        result = _result(measurements, len(self._slots), code, reason, text)
        if result.status == "failed" and (mismatch := _mismatch(measurements)):
            raise TrialError(
                f"{self._subject.source}: the engine does not use the settings of a candidate: "
                f"{mismatch}; merge {self._subject.overrides_key} into the engine's configuration"
            )
        return Result(
            result.status,
            result.step_seconds,
            result.memory,
            result.reason,
            result.rows,
            seconds,
            cpu_seconds,
        )

    def _run(
        self, request: Request, overrides: Mapping[str, Any]
    ) -> tuple[RunFiles, int | None, str]:
        """Run the ranks; return their files, their exit code (None: stopped) and the reason."""
        self._number += 1
        folder = RunFolder(self._directory / f"run-{os.getpid()}-{self._number}")
        folder.create()
        files = RunFiles(folder.path)
        files.write_request(request)
        ranks = len(self._slots)
        write_run_spec(self._subject.run_spec(folder.path, ranks, overrides), folder.spec)
        start = start_launcher if self._fork_server is None else self._fork_server.start
        process = start(folder, self._environment | {_ENV_AUTOTUNE: str(folder.path)})
        save_launcher_pid(folder, process)
        deadline = time.monotonic() + self._timeout_s
        failed_at = None
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                # Without memory, a rank that has failed may be unable to end.
                if failed_at is None and folder.reason.is_file():
                    failed_at = time.monotonic()
                    deadline = min(deadline, failed_at + _EXIT_S)
        finally:
            is_stopped = process.poll() is None
            stop_launcher(process, _GRACE_S)
            kill_leftovers(folder)
        outcome = read_outcome(folder.path)
        if is_stopped and (failure := read_reason(folder.path)):
            return files, failure.exit_code, failure.reason or ""
        if is_stopped:
            return files, None, f"stopped after {self._timeout_s:.0f} s"
        if outcome is None:
            return files, 1, tail(folder.launcher_log, 1).strip() or "the launcher was killed"
        return files, outcome.exit_code, outcome.reason or ""

    def _cpu_s(self) -> float:
        """Return the CPU time of all runs that have ended."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = usage.ru_utime + usage.ru_stime
        if self._fork_server is not None:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(self._fork_server.pid).cpu_times()
                seconds += times.children_user + times.children_system
        return seconds

    def _errors(self, files: RunFiles) -> str:
        folder = RunFolder(files.directory)
        return "\n".join(tail(folder.stderr(rank), _TAIL_LINES) for rank in range(len(self._slots)))

    def _remove(self, files: RunFiles) -> None:
        shutil.rmtree(files.directory, ignore_errors=True)


def is_out_of_memory(exit_code: int | None, text: str) -> bool:
    """Return whether a run ended because memory ran out.

    Args:
        exit_code: Exit code of the first rank that failed, -n for signal n.
        text: Its last messages.

    Example:
        >>> is_out_of_memory(1, "DefaultCPUAllocator: can't allocate memory: you tried to ...")
        True
        >>> is_out_of_memory(1, "ValueError: hidden must be even")
        False
    """
    return exit_code == _KILLED or bool(_OUT_OF_MEMORY.search(text))


def _result(
    measurements: Sequence[Measurement], ranks: int, code: int | None, reason: str, text: str
) -> Result:
    memory = max((item.memory for item in measurements), default=0)
    rows = measurements[0].rows if measurements else None
    steps = measurements[0].step_seconds if measurements else ()
    if len(measurements) == ranks and all(item.complete for item in measurements):
        return Result("measured", steps, memory, rows=rows)
    if any(item.slow for item in measurements):
        reason = f"stopped after {len(steps)} steps: twice as slow as the best"
        return Result("slow", steps, memory, reason, rows)
    if code is None:
        return Result("timed out", steps, memory, reason, rows)
    if code and is_out_of_memory(code, f"{reason}\n{text}"):
        used = f"after {size_text(memory)}" if memory else "before the first measured step"
        return Result("out of memory", steps, memory, f"out of memory {used}", rows)
    return Result("failed", steps, memory, reason or "it ended before the measured steps", rows)


def _mismatch(measurements: Sequence[Measurement]) -> str:
    return next((item.mismatch for item in measurements if item.mismatch), "")
