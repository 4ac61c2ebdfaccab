"""Main loop of the agent: starts and stops runs according to the server's work list."""

import itertools
import logging
import math
import os
import signal
import socket
import threading
import time

from zerolab.agent.run import Run, finish_run, leftover_runs, run_environment
from zerolab.client.http import Client
from zerolab.client.transport import Backoff
from zerolab.contract.messages import (
    KILL_GRACE_S,
    AgentLoad,
    AgentRegistration,
    AgentWork,
    WorkItem,
)
from zerolab.contract.names import DEFAULT_POOL
from zerolab.contract.run_folder import RunFolder
from zerolab.errors import (
    ConfigError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    ZerolabError,
)
from zerolab.files import lock_file, write_json
from zerolab.launcher.interface import Launcher
from zerolab.paths import Home
from zerolab.registry import PARTS

__all__ = ["Agent"]

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 20.0
"""Seconds for ranks to checkpoint when the agent is stopped."""
_DELIVERY_S = 10.0
"""Seconds to deliver the remaining reports and logs after that."""
_LEAVE_TIMEOUT_S = 5.0
"""Timeout of the agent's deregistration in seconds; a hanging server must not delay the exit."""
_WAIT_S = 30.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_ALIVE_POLL_S = 1.0
_SLOTS_POLL_S = 5.0
_REFUSALS = (ConfigError, ConflictError, ForbiddenError, NotFoundError)
"""Permanent errors of a registration: retries would not help."""


class Agent:
    """Offers slots of a machine, executes runs and reports.

    Args:
        home: Data directory with the runs; used by one agent at a time.
        client: Client of the server.
        launcher: Starts the ranks; provides the slots that are offered.
        for_hosts: Launcher of runs with a hostfile; ``launcher`` if None.
        name: Name of this agent; the machine's name if empty.
        pool: The pool that it joins.
    """

    def __init__(
        self,
        home: Home,
        client: Client,
        launcher: Launcher,
        for_hosts: Launcher | None = None,
        *,
        name: str = "",
        pool: str = DEFAULT_POOL,
    ) -> None:
        self._home = home
        self._client = client
        self._slots = list(launcher.offers())
        self._name = name or socket.gethostname()
        self._pool = pool
        self._identity = home.identity()
        self._agent_id: int | None = None
        self._refused: ZerolabError | None = None
        self._polling_error: tuple[type[Exception], float] | None = (
            None  # last reported kind of error, and its start
        )
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._changing = threading.Lock()
        self._runs: dict[int, Run] = {}
        self._finished: dict[int, float] = {}  # runs of an earlier agent
        self._launcher = launcher
        self._for_hosts = for_hosts or launcher
        part = PARTS.find("system_metrics")
        self._meter = part.LoadMeter(home.path) if part else None
        self._load: AgentLoad | None = None
        """Measurements that are not sent yet."""

    def run(self) -> None:
        """Execute runs until SIGTERM or SIGINT; then stop them so that they can checkpoint.

        Raises:
            ConflictError: If another agent has this data directory, or this name.
            ZerolabError: If the server rejects the registration, or later because another agent has
                this name.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self._stopping.set())
        try:
            lock = lock_file(self._home.agent_lock)
        except BlockingIOError as error:
            msg = f"another agent runs with the data directory {self._home.path}"
            raise ConflictError(f"{msg}; stop it with `zerolab down`") from error
        with lock:
            self._write_agent_file()
            try:
                self._work()
            finally:
                self._home.agent_file.unlink(missing_ok=True)
        if self._refused is not None:
            raise self._refused

    def _work(self) -> None:
        for run_id, folder in leftover_runs(self._home.runs, self._launcher):
            logger.info("delivering the results of run %d, which an earlier agent started", run_id)
            arguments = (folder, run_id)
            threading.Thread(target=self._finish, args=arguments, daemon=True).start()
        threading.Thread(target=self._poll, name="poll", daemon=True).start()
        threading.Thread(target=self._watch_slots, name="slots", daemon=True).start()
        while not self._stopping.is_set():
            self._launcher.keep_ready()
            self._stopping.wait(_ALIVE_POLL_S)
        if self._refused is None:
            logger.info("stopping the agent and its runs")
        answered = self._deregister(done=False)
        self._stop_runs()
        if answered:
            self._deregister(done=True)
        self._launcher.close()

    def _watch_slots(self) -> None:
        """Measure the load, and register again whenever the usable slots change."""
        while not self._stopping.wait(_SLOTS_POLL_S):
            try:
                self._measure()
                offered = list(self._launcher.offers())
                if offered == self._slots:
                    continue
                self._slots = offered
                if self._agent_id is not None and not self._stopping.is_set():
                    self._agent_id = self._register()
            except ZerolabError as error:
                logger.warning("%s", error)
                self._agent_id = None  # registers again when the server responds
            except Exception:  # the thread's boundary
                logger.exception("cannot query the slots of this machine; retrying")

    def _measure(self) -> None:
        """Measure the machine and the slots; the next request for work sends the result."""
        if self._meter is None:
            return
        with self._changing:
            runs = list(self._runs.values())
        ranks = {pid: slots for run in runs for pid, slots in run.rank_slots().items()}
        try:
            self._load = self._meter.measure(self._slots, ranks)
        except Exception as error:  # noqa: BLE001 - a failing sensor must not stop the agent
            logger.warning("the load of this machine is no longer reported: %s", error)
            self._meter = None

    def _finish(self, folder: RunFolder, run_id: int) -> None:
        finish_run(folder, run_id, self._client, self._closing)
        self._finished[run_id] = time.monotonic()

    def _ended_at(self, run_id: int) -> float:
        """Return when the server acknowledged the end of a run here, or minus infinity."""
        run = self._runs.get(run_id)
        ended_at = self._finished.get(run_id) if run is None else run.ended_at
        return -math.inf if ended_at is None else ended_at

    def _stop_runs(self) -> None:
        with self._changing:  # no run begins after this
            runs = list(self._runs.values())
        for run in runs:
            run.stop(_STOP_GRACE_S)
        deadline = time.monotonic() + _STOP_GRACE_S + _DELIVERY_S
        while time.monotonic() < deadline and any(not run.join(0.05) for run in runs):
            pass
        self._closing.set()
        for run in runs:
            run.join(_DELIVERY_S)

    def _deregister(self, *, done: bool) -> bool:
        """Ask the server to start no new run here; otherwise it notices later by the timeout.

        Returns:
            Whether the server responded.
        """
        agent_id = self._agent_id
        if agent_id is None:
            return False

        def tell() -> None:
            try:
                self._client.leave(agent_id, done=done)
            except ZerolabError as error:
                logger.info("could not deregister: %s", error)

        leave_thread = threading.Thread(target=tell, name="farewell", daemon=True)
        leave_thread.start()
        leave_thread.join(_LEAVE_TIMEOUT_S)
        return not leave_thread.is_alive()

    def _poll(self) -> None:
        """Request work until the agent stops; the requests are also the heartbeat."""
        version, backoff, registered = 0, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), False
        while not self._stopping.is_set():
            try:
                if self._agent_id is None:
                    self._agent_id = self._register()
                    version, registered = 0, True
                requested_at = time.monotonic()
                load, self._load = self._load, None
                work = self._client.work(self._agent_id, version, _WAIT_S, self._identity, load)
                version = work.version
                backoff.reset()
                self._apply_work(work, requested_at)
                self._log_recovery()
                continue
            except Exception as error:  # noqa: BLE001 - the thread's boundary; polling must continue
                version = 0  # a returning server responds immediately
                if isinstance(error, NotFoundError) and self._agent_id is not None:
                    self._agent_id = None  # unknown to the server: register again
                elif isinstance(error, ConflictError if registered else _REFUSALS):
                    self._refused = error  # after a conflict the work would be another agent's
                    self._stopping.set()
                else:
                    self._log_polling_error(error)
            self._stopping.wait(backoff.pause_s())

    def _log_polling_error(self, error: Exception) -> None:
        """Log why no work arrives, once for each kind of error in a row."""
        before, since = self._polling_error or (None, time.monotonic())
        if before is type(error):
            return
        self._polling_error = type(error), since
        if isinstance(error, ZerolabError):
            logger.warning("polling failed, retrying: %s", error)
        else:
            logger.error("polling failed, retrying", exc_info=error)

    def _log_recovery(self) -> None:
        if self._polling_error is not None:
            away_s = time.monotonic() - self._polling_error[1]
            logger.info("polling succeeded again, after %.0f s", away_s)
            self._polling_error = None

    def _register(self) -> int:
        registration = AgentRegistration(
            self._name, socket.gethostname(), self._slots, self._pool, self._identity
        )
        agent_id = self._client.register_agent(registration, use_join_token=True)
        self._write_agent_file(agent_id=agent_id)
        ready = sum(not slot.down for slot in self._slots)
        logger.info("registered as %s (%s) with %d slots", self._name, agent_id, ready)
        return agent_id

    def _write_agent_file(self, **details: str | int) -> None:
        """Update the agent's file, which ``zerolab up`` and ``down`` read."""
        content = {"pid": os.getpid(), "master": self._client.url, **details}
        write_json(self._home.agent_file, content)

    def _apply_work(self, work: AgentWork, requested_at: float) -> None:
        """Start new runs and stop unlisted ones.

        Args:
            work: All runs that this agent should have.
            requested_at: Time of the request on the monotonic clock; reports sent since then may be
                newer than the response.
        """
        with self._changing:
            if self._stopping.is_set():
                return
            for item in work.runs:
                run = self._runs.get(item.run_id)
                # A run that has ended here stays listed until the server has its outcome.
                if run is None or run.join(0):
                    self._start_run(item, requested_at)
                elif item.action == "kill":
                    run.stop(item.grace_s)
            listed = {item.run_id for item in work.runs}
            for run_id, run in list(self._runs.items()):
                if run_id not in listed:  # superseded, or ended by the server
                    run.stop(KILL_GRACE_S)
                    if run.join(0):
                        del self._runs[run_id]

    def _start_run(self, item: WorkItem, requested_at: float) -> None:
        """Start a run, unless it has already ended here."""
        folder = RunFolder(self._home.run(item.run_id))
        if folder.path.exists():
            if not folder.delivered.exists() or self._ended_at(item.run_id) >= requested_at:
                return  # its end is not delivered yet, or was not at the time of the response
            _rename_old_run(folder)
        environment = run_environment(self._slots, item.slot_ids)
        run = Run(
            item,
            folder,
            self._client,
            environment=environment,
            launcher=self._for_hosts if item.spec.hosts else self._launcher,
            closing=self._closing,
            cache=self._home.cache,
        )
        if item.action == "kill":
            run.stop(0)
        self._runs[item.run_id] = run
        run.start()


def _rename_old_run(folder: RunFolder) -> None:
    """Rename the directory of a run with the same number from another database."""
    for number in itertools.count(1):
        target = folder.path.with_name(f"{folder.path.name}.old-{number}")
        if not target.exists():
            folder.path.rename(target)
            return
