"""Start and supervision of a run's ranks by torch's elastic agent.

The elastic agent starts the ranks, watches them, and stops all of them when one fails. It never
restarts them: the server does, with a new run. So the agent's store is never reused (reuse breaks
restarts on gloo), and no rank needs its own port.

On a CPU the ranks of a trial class are forked from the launcher, which has preloaded their modules.
Commands, and ranks with a GPU, are started as new processes.
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
from contextlib import AbstractContextManager, nullcontext
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
    CHECKPOINTED_EXITS,
    DELIBERATE_EXITS,
    REACHED_BOUND,
    Outcome,
    first_failure,
    read_reason,
    write_outcome,
    write_reason,
)
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import (
    ENV_AS_DEEPSPEED,
    ENV_HOSTS,
    ENV_RUN_SPEC,
    ENV_SCRIPT,
    EXIT_INFRASTRUCTURE,
    EXIT_PREEMPTED,
    EXIT_REACHED,
    EXIT_USER_ERROR,
    Command,
    RunSpec,
    TrialClass,
    read_run_spec,
)
from zerolab.errors import ConfigError
from zerolab.launcher.rank import announce_rank
from zerolab.linux import PARENT_DIED, reap_adopted
from zerolab.registry import Registry
from zerotrial.process.early_sigterm import DeferredSigterm, StoppedEarlyError
from zerotrial.process.preloading import TRIAL_CLASS_MODULES, import_next
from zerotrial.process.rendezvous import choose_network_interface, create_rendezvous

__all__ = ["launch", "run_launcher", "run_rank"]

logger = logging.getLogger(__name__)

REPLACEMENTS: Registry[Callable[[], None]] = Registry("zerotrial.replacements", {})
"""Functions of extensions that replace a module which scripts import, by its name."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_READY_TIMEOUT_S = 10.0
"""Seconds to wait for starting ranks to install their SIGTERM handlers."""
_REAP_INTERVAL_S = 10.0
"""Seconds between two rounds of reaping orphans that the launcher has adopted."""
_SIMULTANEOUS_S = 2
"""Failures at most this many seconds apart may have one common cause."""


class _RunLogs(LogsSpecs):
    """Log files of the ranks in the run's directory, named by global rank."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self._folder = folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        folder, ranks = self._folder, {local: int(env["RANK"]) for local, env in envs.items()}
        for rank in ranks.values():
            for file in (folder.stdout(rank), folder.stderr(rank)):
                file.touch(0o600)  # torch would use the umask's mode
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


class _ElasticAgent(LocalElasticAgent):
    """torch's elastic agent with deferred signals and complete exit codes."""

    def __init__(self, *args: Any, run: RunSpec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shutdown_timeout = math.ceil(run.grace_s)
        self._run_spec = run
        self._pending_signal: int | None = None
        self._signal_deadline = 0.0
        self._reap_next = time.monotonic() + _REAP_INTERVAL_S

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        for signum in _SIGNALS:
            signal.signal(signum, self._record_signal)
        return started

    def _record_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Store a signal for :meth:`_stop_if_ready`."""
        if self._pending_signal is None:
            self._pending_signal = signum
            self._signal_deadline = time.monotonic() + min(
                _READY_TIMEOUT_S, self._run_spec.grace_s / 2
            )

    def _stop_if_ready(self, worker_group: WorkerGroup) -> None:
        """Stop the ranks after a signal; delay SIGTERM until all ranks have handlers.

        SIGTERM would kill a rank that is still importing, and the others would wait for it in a
        collective. A command may never become ready, since it handles signals itself.

        Raises:
            SignalException: To stop the ranks now.
        """
        if self._pending_signal is None:
            return
        folder = RunFolder(Path(self._run_spec.run_dir))
        ready = [folder.ready(worker.global_rank).exists() for worker in worker_group.workers]
        will_be_ready = any(ready) or isinstance(self._run_spec.entrypoint, TrialClass)
        wait = self._pending_signal == signal.SIGTERM and will_be_ready and not all(ready)
        if wait and time.monotonic() < self._signal_deadline:
            return
        name = signal.Signals(self._pending_signal).name
        raise SignalException(
            f"the run was stopped by {name}", signal.Signals(self._pending_signal)
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._stop_if_ready(worker_group)
        context = self._pcontext
        if context is not None and time.monotonic() >= self._reap_next:
            self._reap_next = time.monotonic() + _REAP_INTERVAL_S
            reap_adopted(context.pids().values())
        forked = context._pc if isinstance(context, MultiprocessContext) else None  # noqa: SLF001 - there is no public way
        if forked is None or not isinstance(context, MultiprocessContext):
            commands: RunResult = super()._monitor_workers(worker_group)
            return commands
        codes = _exit_codes(forked)
        if any(codes.values()):
            codes = _exit_codes(forked)  # again: the rank that failed first may be missing
        elif len(codes) < len(forked.processes):
            return RunResult(WorkerState.HEALTHY)
        # torch waits for the return value of a forked rank; os._exit(0) returns none.
        values = context._return_values  # noqa: SLF001 - there is no public way
        values.update({rank: values.get(rank) for rank, code in codes.items() if code == 0})
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():  # torch records only the failure that it saw first
            for rank, code in codes.items():
                if code:
                    failed = ProcessFailure(rank, forked.processes[rank].pid, code, error_file="")
                    result.failures.setdefault(worker_group.workers[rank].global_rank, failed)
        return result


def _exit_codes(forked: ProcessContext) -> dict[int, int]:
    """Return the exit codes of the exited ranks, by local rank."""
    codes = {rank: process.exitcode for rank, process in enumerate(forked.processes)}
    return {rank: code for rank, code in codes.items() if code is not None}


def launch(spec_file: Path, sigterm: DeferredSigterm) -> Outcome:
    """Run all ranks of a run to their end.

    Args:
        spec_file: File of the :class:`zerolab.contract.spec.RunSpec`.
        sigterm: Handler that has deferred SIGTERM until now.

    Returns:
        The outcome; a rank's failure is not an exception here.
    """
    spec = read_run_spec(spec_file)
    folder = RunFolder(Path(spec.run_dir))
    folder.create()
    os.environ[ENV_RUN_SPEC] = str(spec_file)
    choose_network_interface(spec.nodes)
    os.environ["PYTHONUNBUFFERED"] = "1"
    # `python` in a command is this interpreter, even if its environment is not active.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    kind = "cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"
    if not (isinstance(spec.entrypoint, Command) and spec.entrypoint.plain):
        os.environ[ENV_HOSTS] = ",".join(spec.host_names) or socket.gethostname()
    os.environ.update(spec.variables.get(kind, {}))
    _replace_deepspeed()
    os.chdir(spec.model_dir)
    try:
        sigterm.release()
        with _staged(spec, spec_file) as staging_outcome:
            return staging_outcome or _run_ranks(spec, folder)
    except StoppedEarlyError:
        message = "the run was stopped by SIGTERM before its ranks began"
        # Ranks of other machines may wait for these, so a multi-node run has failed.
        code = -signal.SIGTERM if _is_multi_node(spec) else EXIT_PREEMPTED
        return Outcome(code, message, was_stopped=True)


def _replace_deepspeed() -> None:
    """Make ``import deepspeed`` find the extension's replacement, if the run asks for it.

    Raises:
        ConfigError: If the extension is not installed.
    """
    if os.environ.get(ENV_AS_DEEPSPEED, "0") in {"", "0"}:
        return
    if problem := REPLACEMENTS.problem("deepspeed"):
        raise ConfigError("environment.deepspeed", [problem])
    REPLACEMENTS["deepspeed"]()


def _staged(spec: RunSpec, spec_file: Path) -> AbstractContextManager[Outcome | None]:
    """Return the context in which a run's data is staged, if it has any."""
    if spec.stage is None:
        return nullcontext()
    hooks: Registry[Callable[..., AbstractContextManager[Outcome | None]]]
    hooks = Registry("zerolab.run_hooks", {})
    if problem := hooks.problem("stage"):
        return nullcontext(Outcome(EXIT_USER_ERROR, f"data.stage: {problem}"))
    return hooks["stage"](spec, spec_file)


def _is_multi_node(spec: RunSpec) -> bool:
    """Return whether the run has launchers on other machines."""
    return spec.nodes is not None and len(spec.nodes.slots) > 1


def _run_ranks(spec: RunSpec, folder: RunFolder) -> Outcome:
    try:
        result = _run_elastic_agent(spec, folder)
    except SignalException as stopped:
        recorded = read_reason(folder.path)
        name = signal.Signals(stopped.sigval).name
        return recorded or Outcome(
            -stopped.sigval, f"the run was stopped by {name}", was_stopped=True
        )
    if result.failures:
        rank, first = _root_failure(result.failures)
        return first_failure(folder.path, rank, first.exitcode)
    return read_reason(folder.path) or Outcome(0)


def _run_elastic_agent(spec: RunSpec, folder: RunFolder) -> RunResult:
    parent = str(os.getpid())
    target = spec.entrypoint
    entrypoint: str | Callable[[str], None] = sys.executable
    if isinstance(target, Command):
        arguments = [
            "-P",
            "-m",
            "zerolab.launcher.rank",
            parent,
            str(folder.ranks),
            *_rank_options(target, spec.slots_per_rank),
            "--",
            *target.words,
        ]
    elif os.environ.get("CUDA_VISIBLE_DEVICES"):  # CUDA does not survive a fork
        arguments = ["-P", "-m", "zerotrial.process.launch", "--rank", parent]
    else:
        entrypoint, arguments = run_rank, [parent]
        pending = [name for name in TRIAL_CLASS_MODULES if name not in sys.modules]
        while pending and spec.local_slots > 1:
            import_next(pending)
    if _is_multi_node(spec):  # torch waits for the others in calls that no handler interrupts
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    workers = WorkerSpec(
        role="rank",
        local_world_size=spec.local_slots,
        rdzv_handler=create_rendezvous(str(spec.run_id), spec.nodes, staged=spec.stage is not None),
        entrypoint=entrypoint,
        args=tuple(arguments),
        max_restarts=0,
        monitor_interval=0.05,
        local_addr=spec.nodes.address if spec.nodes else "127.0.0.1",
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(signum.name for signum in _SIGNALS)
    agent = _ElasticAgent(workers, logs_specs=_RunLogs(folder), start_method="fork", run=spec)
    result: RunResult = agent.run()
    return result


def _rank_options(command: Command, slots_per_rank: int) -> list[str]:
    """Return the options of :mod:`zerolab.launcher.rank` for a command."""
    options = [f"--hide={ENV_SCRIPT}"]
    if command.plain:
        options.append(f"--hide={ENV_RUN_SPEC}")
    if slots_per_rank > 1:
        options.append(f"--slots={slots_per_rank}")
    if command.cores is not None:
        options.append(f"--bind-cores={','.join(map(str, command.cores))}")
    if command.local_rank_at is not None:
        options.append(f"--local-rank-at={command.local_rank_at}")
    return options


def _root_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the failure that caused the others.

    Among simultaneous failures a rank killed by a signal other than SIGTERM comes first: the
    others fail because it is gone. SIGTERM comes last, since the elastic agent sends it to
    surviving ranks.
    """
    first = min(failed.timestamp for failed in failures.values())
    simultaneous = [
        (rank, failed)
        for rank, failed in failures.items()
        if failed.timestamp <= first + _SIMULTANEOUS_S
    ]
    killed = [item for item in simultaneous if item[1].exitcode < 0]
    crashed = [item for item in killed if item[1].exitcode != -signal.SIGTERM]
    exited = [item for item in simultaneous if item not in killed]
    return (crashed or exited or killed)[0]


def run_rank(parent: str, *, forked: bool = True) -> None:
    """Run one rank of a trial class in the environment that the elastic agent has set.

    Args:
        parent: Process id of the launcher.
        forked: Whether this process was forked from the launcher and inherits its handlers.
    """
    if forked:
        for signum in (*_SIGNALS, PARENT_DIED):
            signal.signal(signum, signal.SIG_DFL)
        _clear_exit_handlers()
    folder = RunFolder(Path(os.environ[ENV_RUN_SPEC]).parent)
    announce_rank(int(parent), folder.ranks)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # torch read the variable before the fork
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
    sys.argv = ["zerotrial.process.harness"]
    sys.path.insert(0, str(Path.cwd()))
    code = _run_harness()
    try:
        atexit._run_exitfuncs()  # noqa: SLF001 - a forked process ends without them
        logging.shutdown()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    run_dir = folder.path
    if code in DELIBERATE_EXITS and read_reason(run_dir) is None:
        descriptions = {EXIT_REACHED: REACHED_BOUND, EXIT_PREEMPTED: "preempted"}
        text = descriptions.get(code, f"rank {os.environ['RANK']} exited with code {code}")
        write_reason(run_dir, code, text)
    if code != 0 and code not in CHECKPOINTED_EXITS:
        sys.exit(code)
    os._exit(0)  # a return would wait for the agent, which no longer reads after SIGTERM


def _clear_exit_handlers() -> None:
    """Remove the exit handlers that belong to the parent process."""
    atexit._clear()  # noqa: SLF001 - there is no public way
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # noqa: SLF001 - same
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # noqa: SLF001


def _run_harness() -> int:
    from zerotrial.process import harness

    code: int | str | None
    try:
        code = harness.main()
    except SystemExit as exit_request:
        code = exit_request.code
    except BaseException:  # noqa: BLE001 - the process boundary; the exit code reports it
        traceback.print_exc()
        return 1
    if isinstance(code, str):
        print(code, file=sys.stderr)  # noqa: T201 - as Python does with sys.exit(text)
        return 1
    return int(code or 0)


def run_launcher(spec_file: Path, sigterm: DeferredSigterm) -> int:
    """Run all ranks and write the outcome to the run's directory.

    Args:
        spec_file: As for :func:`launch`.
        sigterm: As for :func:`launch`.

    Returns:
        Exit code of this process: 0 if the outcome is written, else one of
        :mod:`zerolab.contract.spec`, or 1.
    """
    try:
        outcome = launch(spec_file, sigterm)
    except Exception as error:
        logger.exception("the ranks could not be run")
        outcome = Outcome(1, f"the launcher failed: {type(error).__name__}: {error}")
    try:
        write_outcome(spec_file.parent, outcome)
    except OSError:
        logger.exception("cannot write the outcome of the run")
        if outcome.exit_code == 0:
            return EXIT_INFRASTRUCTURE  # the trial resumes from its last checkpoint
        return outcome.exit_code if outcome.exit_code in DELIBERATE_EXITS else 1
    return 0
