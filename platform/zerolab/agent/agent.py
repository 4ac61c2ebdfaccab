"""The agent's loop: what the server wants of this machine is made true."""

import itertools
import logging
import math
import os
import signal
import socket
import threading
import time

import filelock

from zerolab.agent.run import Run, finish_run, leftover_runs
from zerolab.agent.slots import run_environment
from zerolab.client.backoff import Backoff
from zerolab.client.http import Client
from zerolab.contract.messages import KILL_GRACE_S, AgentRegistration, AgentWork, WorkItem
from zerolab.contract.names import DEFAULT_POOL
from zerolab.contract.run_folder import RunFolder
from zerolab.errors import (
    ConfigError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    ZerolabError,
)
from zerolab.files import write_json
from zerolab.launcher.interface import Launcher
from zerolab.paths import Home

__all__ = ["Agent"]

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 20.0
"""For ranks to checkpoint when the agent is stopped, in seconds."""
_DELIVERY_S = 10.0
"""For what they leave, after that."""
_FAREWELL_S = 5.0
"""For the server to hear that this agent leaves; one that hangs holds nobody up."""
_WAIT_S = 30.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_ALIVE_POLL_S = 1.0
_SLOTS_POLL_S = 5.0
_REFUSALS = (ConfigError, ConflictError, ForbiddenError, NotFoundError)
"""What an agent that is not known yet is told for good: waiting would change nothing."""


class Agent:
    """Offers slots, runs what it is given, and reports.

    Args:
        home: Holds the runs; one agent at a time.
        client: The server.
        launcher: Starts the ranks; has the slots that are offered.
        for_hosts: Starts those that name machines of a hostfile; ``launcher`` does when None.
        name: Of this agent; the machine's when empty.
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
        self._trouble: tuple[type[Exception], float] | None = None  # told last, and since when
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._changing = threading.Lock()
        self._runs: dict[int, Run] = {}
        self._finished: dict[int, float] = {}  # runs that an earlier agent left
        self._launcher = launcher
        self._for_hosts = for_hosts or launcher

    def run(self) -> None:
        """Work until SIGTERM or SIGINT; then stop the runs, so that they may checkpoint.

        Raises:
            ConflictError: If another agent has this data directory, or this name.
            ZerolabError: If the server refuses it: as it first introduces itself, or, later, for
                another agent that has its name.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self._stopping.set())
        lock = filelock.FileLock(self._home.agent_lock, mode=0o600)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            msg = f"another agent runs with the data directory {self._home.path}"
            raise ConflictError(f"{msg}; stop it with `zerolab down`") from error
        with lock:
            self._note()
            try:
                self._work()
            finally:
                self._home.agent_file.unlink(missing_ok=True)
        if self._refused is not None:
            raise self._refused

    def _work(self) -> None:
        for run_id, folder in leftover_runs(self._home.runs, self._launcher):
            logger.info("run %d was left by an earlier agent", run_id)
            arguments = (folder, run_id)
            threading.Thread(target=self._finish, args=arguments, daemon=True).start()
        threading.Thread(target=self._poll, name="poll", daemon=True).start()
        threading.Thread(target=self._watch_slots, name="slots", daemon=True).start()
        while not self._stopping.is_set():
            self._launcher.keep_ready()
            self._stopping.wait(_ALIVE_POLL_S)
        if self._refused is None:
            logger.info("stopping")
        answered = self._tell_leaving(done=False)
        self._stop_runs()
        if answered:
            self._tell_leaving(done=True)
        self._launcher.close()

    def _watch_slots(self) -> None:
        """Tell the server when other slots than before can be used."""
        while not self._stopping.wait(_SLOTS_POLL_S):
            try:
                offered = list(self._launcher.offers())
                if offered == self._slots:
                    continue
                self._slots = offered
                if self._agent_id is not None and not self._stopping.is_set():
                    self._agent_id = self._register()
            except ZerolabError as error:
                logger.warning("%s", error)
                self._agent_id = None  # it introduces itself again when the server is there
            except Exception:  # the thread's boundary
                logger.exception("asking for the slots failed")

    def _finish(self, folder: RunFolder, run_id: int) -> None:
        finish_run(folder, run_id, self._client, self._closing)
        self._finished[run_id] = time.monotonic()

    def _ended_at(self, run_id: int) -> float:
        """When the server learned here how a run had ended; before all time if it was not here."""
        run = self._runs.get(run_id)
        ended = self._finished.get(run_id) if run is None else run.ended_at
        return -math.inf if ended is None else ended

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

    def _tell_leaving(self, *, done: bool) -> bool:
        """Have the server start nothing here any more; it finds out by itself, only later.

        Returns:
            Whether the server is there: one that does not answer need not be told again.
        """
        agent_id = self._agent_id
        if agent_id is None:
            return False

        def tell() -> None:
            try:
                self._client.leave(agent_id, done=done)
            except ZerolabError as error:
                logger.info("the server does not hear that this agent leaves: %s", error)

        farewell = threading.Thread(target=tell, name="farewell", daemon=True)
        farewell.start()
        farewell.join(_FAREWELL_S)
        return not farewell.is_alive()

    def _poll(self) -> None:
        """Ask for work until the agent stops; also what keeps it alive for the server."""
        version, backoff, known = 0, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), False
        while not self._stopping.is_set():
            try:
                if self._agent_id is None:
                    self._agent_id = self._register()
                    version, known = 0, True
                asked = time.monotonic()
                work = self._client.work(self._agent_id, version, _WAIT_S, self._identity)
                version = work.version
                backoff.reset()
                self._apply(work, asked)
                self._note_return()
                continue
            except Exception as error:  # noqa: BLE001 - the thread's boundary; else it would be deaf
                version = 0  # it is answered at once when the server is back
                if isinstance(error, NotFoundError) and self._agent_id is not None:
                    self._agent_id = None  # it does not know us: introduce ourselves again
                elif isinstance(error, ConflictError if known else _REFUSALS):
                    self._refused = error  # with a conflict, we would get another agent's runs
                    self._stopping.set()
                else:
                    self._note_trouble(error)
            self._stopping.wait(backoff.pause_s())

    def _note_trouble(self, error: Exception) -> None:
        """Tell why no work is given, once for each kind of reason in a row."""
        before, since = self._trouble or (None, time.monotonic())
        if before is type(error):
            return
        self._trouble = type(error), since
        if isinstance(error, ZerolabError):
            logger.warning("no work, and asking goes on: %s", error)
        else:
            logger.error("asking for work failed, and goes on", exc_info=error)

    def _note_return(self) -> None:
        if self._trouble is not None:
            away_s = time.monotonic() - self._trouble[1]
            logger.info("the server gives work again, after %.0f s", away_s)
            self._trouble = None

    def _register(self) -> int:
        registration = AgentRegistration(
            self._name, socket.gethostname(), self._slots, self._pool, self._identity
        )
        agent_id = self._client.register_agent(registration, use_join_token=True)
        self._note(agent_id=agent_id)
        ready = sum(not slot.down for slot in self._slots)
        logger.info("registered as %s (%s) with %d slots", self._name, agent_id, ready)
        return agent_id

    def _note(self, **known: str | int) -> None:
        """Tell ``zerolab up`` and ``down`` about us."""
        noted = {"pid": os.getpid(), "master": self._client.url, **known}
        write_json(self._home.agent_file, noted)

    def _apply(self, work: AgentWork, asked: float) -> None:
        """Begin what is new and stop what is not wanted.

        Args:
            work: All that the server wants of this agent.
            asked: When it was asked, on the monotonic clock: the answer may be older than what
                we have told since.
        """
        with self._changing:
            if self._stopping.is_set():
                return
            for item in work.runs:
                run = self._runs.get(item.run_id)
                if run is None or run.join(0):
                    self._begin(item, asked)
                elif item.action == "kill":
                    run.stop(item.grace_s)
            wanted = {item.run_id for item in work.runs}
            for run_id, run in list(self._runs.items()):
                if run_id not in wanted:
                    run.stop(KILL_GRACE_S)
                    if run.join(0):
                        del self._runs[run_id]

    def _begin(self, item: WorkItem, asked: float) -> None:
        """Start a run, unless it is one that has ended here."""
        folder = RunFolder(self._home.run(item.run_id))
        if folder.path.exists():
            if not folder.delivered.exists() or self._ended_at(item.run_id) >= asked:
                return  # its end is not delivered yet, or was not when the server answered
            _put_away(folder)
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


def _put_away(folder: RunFolder) -> None:
    """Make room for a run whose number another one has had, under another database."""
    for number in itertools.count(1):
        place = folder.path.with_name(f"{folder.path.name}.old-{number}")
        if not place.exists():
            folder.path.rename(place)
            return
