"""The ranks of one run under torch's elastic agent.

The elastic agent starts the ranks, watches them, and stops all of them when one fails. It never
restarts them: the server does, with a new run, so the store that the agent serves is never used
twice (a second use is what breaks restarts on gloo), and no rank needs a port of its own.

On a CPU the ranks of a trial class are forked from the launcher, which has imported what they need;
commands, and ranks with a GPU, are started afresh.
"""

import atexit
import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import (
    LogsDest,
    LogsSpecs,
    MultiprocessContext,
    SignalException,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.multiprocessing.spawn import ProcessContext

from zerolab.contract.outcome import (
    DELIBERATE,
    LEAVING,
    REACHED_BOUND,
    Outcome,
    failure,
    read_reason,
    write_outcome,
    write_reason,
)
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import (
    ENV_HOSTS,
    ENV_RUN_SPEC,
    ENV_SCRIPT,
    EXIT_INFRASTRUCTURE,
    EXIT_PREEMPTED,
    EXIT_REACHED,
    Command,
    RunSpec,
    TrialClass,
    read_run_spec,
)
from zerolab.launcher.rank import announce_rank
from zerolab.linux import PARENT_DIED, reap_adopted
from zerolab.staging.start import staged
from zerotrial.compat.deepspeed import install_from_environment
from zerotrial.process.early_sigterm import EarlySignal, StoppedEarlyError
from zerotrial.process.preloading import FOR_CLASSES, import_next
from zerotrial.process.rendezvous import meet, name_interface

__all__ = ["launch", "run_launcher", "run_rank"]

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_READY_S = 10.0
"""Longest wait, in seconds, for ranks that are being started to heed SIGTERM."""
_REAP_S = 10.0
"""How often, in seconds, processes that the launcher has adopted are cleared away."""
_SAME_MOMENT_S = 2
"""Failures at most this far apart, in seconds, may be one event seen by several ranks."""


class _RunLogs(LogsSpecs):
    """The ranks' output goes to the run's directory, under the ranks' numbers."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self._folder = folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        folder, ranks = self._folder, {local: int(env["RANK"]) for local, env in envs.items()}
        for rank in ranks.values():
            for file in (folder.stdout(rank), folder.stderr(rank)):
                file.touch(0o600)  # torch leaves the mode to the umask
        return LogsDest(
            stdouts={local: str(folder.stdout(rank)) for local, rank in ranks.items()},
            stderrs={local: str(folder.stderr(rank)) for local, rank in ranks.items()},
            tee_stdouts=dict.fromkeys(ranks, ""),
            tee_stderrs=dict.fromkeys(ranks, ""),
            error_files={
                local: str(folder.ranks / f"error_{rank}.json") for local, rank in ranks.items()
            },
        )

    @property
    def root_log_dir(self) -> str:
        return str(self._folder.logs)


class _Agent(LocalElasticAgent):
    """torch's elastic agent, for ranks that may end in any way they like."""

    def __init__(self, *args: Any, run: RunSpec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shutdown_timeout = math.ceil(run.grace_s)
        self._run_spec = run
        self._asked: int | None = None
        self._asked_until = 0.0
        self._reap_next = time.monotonic() + _REAP_S

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        for number in _SIGNALS:
            signal.signal(number, self._note_signal)
        return started

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        """Hold a signal until the ranks can heed it: see :meth:`_heed_signal`."""
        if self._asked is None:
            self._asked = number
            self._asked_until = time.monotonic() + min(_READY_S, self._run_spec.grace_s / 2)

    def _heed_signal(self, worker_group: WorkerGroup) -> None:
        """Stop the ranks if that was asked for, SIGTERM only when it does not kill some of them.

        A rank that is still importing would die of it, and the others would wait for that one.
        Of a command none may ever be ready: it heeds signals as it likes.

        Raises:
            SignalException: When the ranks are to be stopped now.
        """
        if self._asked is None:
            return
        folder = RunFolder(Path(self._run_spec.run_dir))
        ready = [folder.ready(worker.global_rank).exists() for worker in worker_group.workers]
        may_come = any(ready) or isinstance(self._run_spec.entrypoint, TrialClass)
        held = self._asked == signal.SIGTERM and may_come and not all(ready)
        if held and time.monotonic() < self._asked_until:
            return
        name = signal.Signals(self._asked).name
        raise SignalException(f"the run was stopped by {name}", signal.Signals(self._asked))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._heed_signal(worker_group)
        context = self._pcontext
        if context is not None and time.monotonic() >= self._reap_next:
            self._reap_next = time.monotonic() + _REAP_S
            reap_adopted(context.pids().values())
        forked = context._pc if isinstance(context, MultiprocessContext) else None  # noqa: SLF001 - there is no public way
        if forked is None or not isinstance(context, MultiprocessContext):
            commands: RunResult = super()._monitor_workers(worker_group)
            return commands
        codes = _exit_codes(forked)
        if any(codes.values()):
            codes = _exit_codes(forked)  # now with the one whose death the others died of
        elif len(codes) < len(forked.processes):
            return RunResult(WorkerState.HEALTHY)
        # A forked rank that ends with os._exit(0) returns no value, and would be waited for.
        values = context._return_values  # noqa: SLF001 - there is no public way
        values.update({rank: values.get(rank) for rank, code in codes.items() if code == 0})
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():  # with one failure, whichever of several torch saw first
            for rank, code in codes.items():
                if code:
                    failed = ProcessFailure(rank, forked.processes[rank].pid, code, error_file="")
                    result.failures.setdefault(worker_group.workers[rank].global_rank, failed)
        return result


def _exit_codes(forked: ProcessContext) -> dict[int, int]:
    """Return the exit codes of those ranks that have ended, by local rank."""
    codes = {rank: process.exitcode for rank, process in enumerate(forked.processes)}
    return {rank: code for rank, code in codes.items() if code is not None}


def launch(spec_file: Path, early: EarlySignal) -> Outcome:
    """Run all ranks of a run to their end.

    Args:
        spec_file: The :class:`zerolab.contract.spec.RunSpec`.
        early: Holds SIGTERM until now.

    Returns:
        How the run ended; a rank's failure is not an exception here.
    """
    spec = read_run_spec(spec_file)
    folder = RunFolder(Path(spec.run_dir))
    folder.create()
    os.environ[ENV_RUN_SPEC] = str(spec_file)
    name_interface(spec.nodes)
    os.environ["PYTHONUNBUFFERED"] = "1"
    # `python` in a command is the Python that runs us, whether its environment is active or not.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    kind = "cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"
    if not (isinstance(spec.entrypoint, Command) and spec.entrypoint.plain):
        os.environ[ENV_HOSTS] = ",".join(spec.host_names) or socket.gethostname()
    os.environ.update(spec.variables.get(kind, {}))
    install_from_environment()
    os.chdir(spec.model_dir)
    try:
        early.heed()
        with staged(spec, spec_file) as refused:
            return refused or _run_ranks(spec, folder)
    except StoppedEarlyError:
        told = "the run was stopped by SIGTERM before its ranks began"
        # Ranks of other machines may wait for these: that is no run that has left in good order.
        code = -signal.SIGTERM if _has_others(spec) else EXIT_PREEMPTED
        return Outcome(code, told, told=True)


def _has_others(spec: RunSpec) -> bool:
    """Whether launchers of other machines belong to the run."""
    return spec.nodes is not None and len(spec.nodes.slots) > 1


def _run_ranks(spec: RunSpec, folder: RunFolder) -> Outcome:
    try:
        result = _elastic(spec, folder)
    except SignalException as stopped:
        said = read_reason(folder.path)
        name = signal.Signals(stopped.sigval).name
        return said or Outcome(-stopped.sigval, f"the run was stopped by {name}", told=True)
    if result.failures:
        rank, first = _first_failure(result.failures)
        return failure(folder.path, rank, first.exitcode)
    return read_reason(folder.path) or Outcome(0)


def _elastic(spec: RunSpec, folder: RunFolder) -> RunResult:
    parent = str(os.getpid())
    meant = spec.entrypoint
    entrypoint: str | Callable[[str], None] = sys.executable
    if isinstance(meant, Command):
        words = [
            "-P",
            "-m",
            "zerolab.launcher.rank",
            parent,
            str(folder.ranks),
            *_options(meant, spec.slots_per_rank),
            "--",
            *meant.words,
        ]
    elif os.environ.get("CUDA_VISIBLE_DEVICES"):  # CUDA does not survive a fork
        words = ["-P", "-m", "zerotrial.process.launch", "--rank", parent]
    else:
        entrypoint, words = run_rank, [parent]
        waiting = [name for name in FOR_CLASSES if name not in sys.modules]
        while waiting and spec.local_slots > 1:
            import_next(waiting)
    if _has_others(spec):  # it waits for them in calls of torch that no handler interrupts
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    workers = WorkerSpec(
        role="rank",
        local_world_size=spec.local_slots,
        rdzv_handler=meet(str(spec.run_id), spec.nodes, stages=spec.stage is not None),
        entrypoint=entrypoint,
        args=tuple(words),
        max_restarts=0,
        monitor_interval=0.05,
        local_addr=spec.nodes.address if spec.nodes else "127.0.0.1",
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in _SIGNALS)
    agent = _Agent(workers, logs_specs=_RunLogs(folder), start_method="fork", run=spec)
    result: RunResult = agent.run()
    return result


def _options(command: Command, slots_per_rank: int) -> list[str]:
    """What :mod:`zerolab.launcher.rank` is told about a command."""
    options = [f"--hide={ENV_SCRIPT}"]  # of the process that becomes the command
    if command.plain:
        options.append(f"--hide={ENV_RUN_SPEC}")
    if slots_per_rank > 1:
        options.append(f"--slots={slots_per_rank}")
    if command.cores is not None:
        options.append(f"--bind-cores={','.join(map(str, command.cores))}")
    if command.local_rank_at is not None:
        options.append(f"--local-rank-at={command.local_rank_at}")
    return options


def _first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Pick the rank that brought the others down: of several at once, one that was killed."""
    first = min(failed.timestamp for failed in failures.values())
    together = [
        (rank, failed)
        for rank, failed in failures.items()
        if failed.timestamp <= first + _SAME_MOMENT_S
    ]
    killed = [item for item in together if item[1].exitcode < 0]
    by_others = [item for item in killed if item[1].exitcode != -signal.SIGTERM]
    return (by_others or [item for item in together if item not in killed] or killed)[0]


def run_rank(parent: str, *, forked: bool = True) -> None:
    """Be one rank of a trial class; the elastic agent has set its environment.

    Args:
        parent: Process id of the launcher.
        forked: Whether this process was forked from it, and has what is the parent's own.
    """
    if forked:
        for number in (*_SIGNALS, PARENT_DIED):
            signal.signal(number, signal.SIG_DFL)
        _forget_exit_functions()
    folder = RunFolder(Path(os.environ[ENV_RUN_SPEC]).parent)
    announce_rank(int(parent), folder.ranks)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # the library has read the variable long ago
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request is too much
    sys.argv = ["zerotrial.process.harness"]
    sys.path.insert(0, str(Path.cwd()))
    code = _harness()
    try:
        atexit._run_exitfuncs()  # noqa: SLF001 - a forked process ends without them
        logging.shutdown()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    run_dir = folder.path
    if code in DELIBERATE and read_reason(run_dir) is None:
        known = {EXIT_REACHED: REACHED_BOUND, EXIT_PREEMPTED: "preempted"}
        text = known.get(code, f"rank {os.environ['RANK']} exited with code {code}")
        write_reason(run_dir, code, text)
    if code != 0 and code not in LEAVING:
        sys.exit(code)
    os._exit(0)  # returning would wait for an agent that, after SIGTERM, no longer listens


def _forget_exit_functions() -> None:
    """Leave to the process that we were forked from what it has to do at its end."""
    atexit._clear()  # noqa: SLF001 - there is no public way
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # noqa: SLF001 - same
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # noqa: SLF001


def _harness() -> int:
    from zerotrial.process import harness

    code: int | str | None
    try:
        code = harness.main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - the process boundary; the exit code carries it on
        traceback.print_exc()
        return 1
    if isinstance(code, str):
        print(code, file=sys.stderr)  # noqa: T201 - as Python does with sys.exit(text)
        return 1
    return int(code or 0)


def run_launcher(spec_file: Path, early: EarlySignal) -> int:
    """Run all ranks and leave how it ended in the run's directory.

    Args:
        spec_file: As for :func:`launch`.
        early: As for :func:`launch`.

    Returns:
        Exit code of this process: 0 when the outcome stands in the directory, else one of
        :mod:`zerolab.contract.spec`, or 1.
    """
    try:
        outcome = launch(spec_file, early)
    except Exception as error:
        logger.exception("the ranks could not be run")
        outcome = Outcome(1, f"the launcher failed: {type(error).__name__}: {error}")
    try:
        write_outcome(spec_file.parent, outcome)
    except OSError:
        logger.exception("how the run ended cannot be written down")
        if outcome.exit_code == 0:
            return EXIT_INFRASTRUCTURE  # it goes on from its last checkpoint, and says so then
        return outcome.exit_code if outcome.exit_code in DELIBERATE else 1
    return 0
