"""Start and supervision of a run's ranks on one machine.

All ranks are stopped when one fails, and when the launcher gets a signal. None is restarted: the
server starts a new run instead.

On a CPU the ranks of a trial class are forked from the launcher, which has preloaded their modules.
Commands, and ranks with a GPU, are started as new processes.
"""

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from zerolab.contract.outcome import (
    CHECKPOINTED_EXITS,
    DELIBERATE_EXITS,
    REACHED_BOUND,
    Outcome,
    failed_by_peer,
    first_failure,
    read_reason,
    write_reason,
)
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import (
    ENV_RUN_SPEC,
    EXIT_PREEMPTED,
    EXIT_REACHED,
    Nodes,
    RunSpec,
    TrialClass,
)
from zerolab.launcher.rank import announce_rank
from zerolab.linux import PARENT_DIED, reap_adopted
from zerolab.parent import name_process
from zerotrial.process.rendezvous import Rendezvous

__all__ = ["RankSupervisor", "run_rank"]

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.05
_STOP_POLL_S = 0.01
_READY_TIMEOUT_S = 10.0
"""Seconds to wait for starting ranks to install their SIGTERM handlers."""
_STOP_TIMEOUT_S = 30.0
"""Seconds that the other ranks have to end after one has failed."""
_REAP_INTERVAL_S = 10.0
"""Seconds between two rounds of reaping orphans that the launcher has adopted."""
_SIMULTANEOUS_S = 2.0
"""Failures at most this many seconds apart may have one common cause."""
_CAUSE_S = 5.0
"""Seconds to wait for the rank that failed first, after another rank has lost it and exited."""


class _Forked(ForkProcess):
    """Rank that is forked from the launcher, with the interface of Popen."""

    def poll(self) -> int | None:
        return self.exitcode


class _Rank:
    """One rank and its process."""

    def __init__(self, number: int, process: subprocess.Popen[bytes] | _Forked) -> None:
        self.number = number
        self.process = process
        self.exit_code: int | None = None
        """-n for signal n; None while it runs."""
        self.ended_at = 0.0

    def poll(self) -> int | None:
        """Return the exit code, and record when it was first seen."""
        if self.exit_code is None:
            self.exit_code, self.ended_at = self.process.poll(), time.monotonic()
        return self.exit_code

    def send(self, signum: int) -> None:
        """Signal the rank; a command's child processes get the signal, too."""
        logger.warning("sending %s to rank %d", signal.Signals(signum).name, self.number)
        send = os.kill if isinstance(self.process, _Forked) else os.killpg
        with contextlib.suppress(ProcessLookupError):
            send(self.process.pid or 0, signum)


class RankSupervisor:
    """Starts the ranks of a run on this machine and stops all of them if one fails.

    Args:
        run: The run.
        nodes: Its machines.
        rendezvous: Store that the ranks share, on the first machine.
    """

    def __init__(self, run: RunSpec, nodes: Nodes, rendezvous: Rendezvous) -> None:
        self._run = run
        self._nodes = nodes
        self._rendezvous = rendezvous
        self._folder = RunFolder(Path(run.run_dir))
        self._ranks: list[_Rank] = []
        self._signal: signal.Signals | None = None
        self._signal_deadline = 0.0
        self._outcomes: dict[int, Outcome] = {}
        self._stopped_at = 0.0

    def run(self, command: Sequence[str] | None) -> Outcome:
        """Run all ranks to their end. This process ignores signals from then on.

        Args:
            command: Command line of a rank; None forks the ranks, which run the trial class.

        Returns:
            Outcome of the failure that caused the others, or of the signal with which this process
            was stopped.
        """
        # A handler that raises could leave a rank behind that has just been started.
        for signum in _SIGNALS:
            signal.signal(signum, self._record_signal)
        signal_to_send, timeout_s = signal.SIGTERM, self._run.grace_s
        try:
            for local_rank in range(self._nodes.slots[self._nodes.rank]):
                self._start(local_rank, command)
            if isinstance(self._run.entrypoint, TrialClass):
                self._rendezvous.serve_store()  # while the ranks import torch, too
            reap_next = time.monotonic() + _REAP_INTERVAL_S
            cause_deadline: float | None = None
            while True:
                time.sleep(_POLL_S)
                self._rendezvous.serve_requests()
                if self._signal is not None and self._is_stoppable():
                    signal_to_send = self._signal
                    reason = f"the run was stopped by {self._signal.name}"
                    return Outcome(-self._signal, reason, was_stopped=True)
                if time.monotonic() >= reap_next:
                    reap_next = time.monotonic() + _REAP_INTERVAL_S
                    reap_adopted([rank.process.pid or 0 for rank in self._ranks])
                codes = [rank.poll() for rank in self._ranks]
                if any(codes):
                    cause_deadline = cause_deadline or time.monotonic() + _CAUSE_S
                    if time.monotonic() < cause_deadline and self._awaits_cause():
                        continue
                    timeout_s = _STOP_TIMEOUT_S
                    break
                if None not in codes:
                    return Outcome(0)
        finally:
            self._stopped_at = time.monotonic()
            self._stop(signal_to_send, timeout_s)
        rank, exit_code = self._root_failure()
        return first_failure(self._folder.path, rank.number, exit_code)

    def _awaits_cause(self) -> bool:
        """Return whether the failed ranks only lost another one, which still runs."""
        failed = [(rank, rank.exit_code) for rank in self._ranks if rank.exit_code]
        return any(rank.exit_code is None for rank in self._ranks) and all(
            self._lost_peer(rank, code) for rank, code in failed
        )

    def _lost_peer(self, rank: _Rank, exit_code: int) -> bool:
        if rank.number not in self._outcomes:
            outcome = first_failure(self._folder.path, rank.number, exit_code)
            self._outcomes[rank.number] = outcome
        return failed_by_peer(self._outcomes[rank.number])

    def _start(self, local_rank: int, command: Sequence[str] | None) -> None:
        nodes = self._nodes
        number = sum(nodes.slots[: nodes.rank]) + local_rank
        total = str(sum(nodes.slots))
        environment = {
            "RANK": str(number), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(nodes.rank),
            "WORLD_SIZE": total, "LOCAL_WORLD_SIZE": str(nodes.slots[nodes.rank]),
            "GROUP_WORLD_SIZE": str(len(nodes.slots)),
            "ROLE_NAME": "rank", "ROLE_RANK": str(number), "ROLE_WORLD_SIZE": total,
            "MASTER_ADDR": nodes.address, "MASTER_PORT": str(self._rendezvous.port),
            # torch's ranks then use the launcher's store, so that no rank needs a port.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": str(self._run.run_id),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }  # fmt: skip
        with (
            _create(self._folder.stdout(number)) as out,
            _create(self._folder.stderr(number)) as err,
        ):
            process: subprocess.Popen[bytes] | _Forked
            if command is None:
                arguments = (os.getpid(), environment, out.fileno(), err.fileno())
                process = _Forked(target=_run_forked, args=arguments)
                # The rank first replaces the launcher's handlers, which would only note a signal.
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                process.start()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            else:
                environment = os.environ | environment
                process = subprocess.Popen(
                    command, stdout=out, stderr=err, env=environment, start_new_session=True
                )
        self._ranks.append(_Rank(number, process))

    def _record_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal = signal.Signals(signum)
            timeout_s = min(_READY_TIMEOUT_S, self._run.grace_s / 2)
            self._signal_deadline = time.monotonic() + timeout_s

    def _is_stoppable(self) -> bool:
        """Return whether the ranks can be signalled now: SIGTERM waits until all have handlers.

        SIGTERM would kill a rank that is still importing, and the others would wait for it in a
        collective. A command may never become ready, since it handles signals itself.
        """
        ready = [self._folder.ready(rank.number).exists() for rank in self._ranks]
        will_be_ready = any(ready) or isinstance(self._run.entrypoint, TrialClass)
        return (
            self._signal != signal.SIGTERM
            or not will_be_ready
            or all(ready)
            or time.monotonic() >= self._signal_deadline
        )

    def _stop(self, signum: int, timeout_s: float) -> None:
        """Signal the running ranks, and kill those that are left after a timeout."""
        for number in (signum, signal.SIGKILL):
            running = [rank for rank in self._ranks if rank.poll() is None]
            for rank in running:
                rank.send(number)
            # SIGKILL has a timeout as well: a process inside a driver may not end at all.
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and any(rank.poll() is None for rank in running):
                time.sleep(_STOP_POLL_S)

    def _root_failure(self) -> tuple[_Rank, int]:
        """Return the rank that caused the failures of the others, and its exit code.

        Among failures before the ranks were stopped, and simultaneous ones, a rank killed by a
        signal other than SIGTERM comes first: the others fail because it is gone. Ranks that lost
        another one come after those with another error. SIGTERM comes last, since surviving
        ranks get it.
        """
        ended = sorted(self._ranks, key=lambda rank: rank.ended_at)
        failed = [(rank, rank.exit_code) for rank in ended if rank.exit_code]
        last = max(failed[0][0].ended_at + _SIMULTANEOUS_S, self._stopped_at)
        simultaneous = [item for item in failed if item[0].ended_at <= last]
        crashed = [item for item in simultaneous if item[1] < 0 and item[1] != -signal.SIGTERM]
        exited = [item for item in simultaneous if item[1] > 0]
        exited.sort(key=lambda item: self._lost_peer(*item))
        return (crashed or exited or failed)[0]


def _create(path: Path) -> BinaryIO:
    """Create a log file that only its owner can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def _run_forked(parent: int, environment: dict[str, str], out: int, err: int) -> None:
    """Run a rank in a process that was forked from the launcher."""
    import torch

    for signum in (*_SIGNALS, PARENT_DIED):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    for log, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(log, stream.fileno())
        os.close(log)
    # The exit handlers belong to the launcher.
    atexit._clear()  # noqa: SLF001 - there is no public way
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # noqa: SLF001 - same
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # noqa: SLF001
    os.environ.update(environment)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # torch read the variable before the fork
    run_rank(parent)


def run_rank(parent: int) -> None:
    """Run one rank of a trial class in the environment that the supervisor has set.

    Args:
        parent: Process id of the launcher.
    """
    folder = RunFolder(Path(os.environ[ENV_RUN_SPEC]).parent)
    announce_rank(parent, folder.ranks)
    # Forked ranks have the launcher's command line.
    name_process(f"rank{os.environ['RANK']} run{os.environ['TORCHELASTIC_RUN_ID']}")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
    sys.argv = ["zerotrial.process.harness"]
    sys.path.insert(0, str(Path.cwd()))
    code: int | str | None
    try:
        from zerotrial.process import harness

        code = harness.main()
    except SystemExit as exit_request:
        code = exit_request.code
    except BaseException:  # noqa: BLE001 - the process boundary; the exit code reports it
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)  # noqa: T201 - as Python does with sys.exit(text)
        code = 1
    try:
        atexit._run_exitfuncs()  # noqa: SLF001 - a forked process ends without them
        logging.shutdown()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    if code in DELIBERATE_EXITS and read_reason(folder.path) is None:
        descriptions = {EXIT_REACHED: REACHED_BOUND, EXIT_PREEMPTED: "preempted"}
        text = descriptions.get(code, f"rank {os.environ['RANK']} exited with code {code}")
        write_reason(folder.path, code, text)
    if code and code not in CHECKPOINTED_EXITS:
        sys.exit(code)
    os._exit(0)  # threads of the user's code may still run
