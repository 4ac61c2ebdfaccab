"""One run on this machine, from its archive to the server's knowledge of how it ended."""

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from zerolab.agent.logs import LogShipper
from zerolab.agent.rendezvous import as_seen_from_here, offer_place
from zerolab.client.archive import unpack
from zerolab.client.backoff import Backoff
from zerolab.client.http import Client
from zerolab.contract.hparam_reads import read_unread
from zerolab.contract.messages import RunExit, WorkItem
from zerolab.contract.nodes import failed_by_itself
from zerolab.contract.outcome import (
    DELIBERATE_EXITS,
    Outcome,
    read_outcome,
    signal_text,
    tail,
    write_outcome,
)
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_USER_ERROR,
    Nodes,
    RunSpec,
    read_run_spec,
    write_run_spec,
)
from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConflictError, NotFoundError, UnreachableError, ZerolabError
from zerolab.files import write_json
from zerolab.launcher.interface import Launcher
from zerolab.launcher.interpreter import interpreter_problem
from zerolab.reports.spool_recovery import deliver
from zerolab.storage.filesystem import missing_package

__all__ = ["Run", "finish_run", "leftover_runs"]

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SHIP_S = 0.3
_SHOWN_AFTER_S = 1.0
"""Shorter steps of a start are not shown, in seconds."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_FINAL_TAIL_LINES = 100
_TRIES = 20
"""Of a step that an answering server fails at; half a minute."""

_STOPPED_EARLY = Outcome(EXIT_INFRASTRUCTURE, "the run was stopped before it began")


class _Stoppable(Protocol):
    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Run:
    """A run that this agent executes, in a thread of its own.

    Args:
        item: What to run.
        folder: Its directory; made here.
        client: The server.
        environment: Variables for the ranks: threads, devices.
        launcher: Starts the ranks.
        closing: Set when the agent ends: what the server does not take then stays on disk.
        cache: Directory for what goes to an object store, and comes from there.
    """

    def __init__(
        self,
        item: WorkItem,
        folder: RunFolder,
        client: Client,
        *,
        environment: Mapping[str, str],
        launcher: Launcher,
        closing: threading.Event,
        cache: Path,
    ) -> None:
        self._cache = cache
        self._node = item.spec.nodes.rank if item.spec.nodes is not None else 0
        self.run_id = item.run_id
        self._item = item
        self._folder = folder
        self._client = client
        self._environment = environment
        self._launcher = launcher
        self._closing = closing
        self.ended_at: float | None = None
        """When the server knew how it had ended, on the monotonic clock."""
        self._stop = threading.Event()
        self._grace_s = 0.0
        self._thread = threading.Thread(target=self._main, name=f"run-{item.run_id}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Ask the ranks to end, with SIGTERM, and kill them ``grace_s`` seconds later."""
        if not self._stop.is_set():
            self._grace_s = grace_s
            self._stop.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; return whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            outcome = self._execute()
        except Exception as error:  # the thread's boundary: the server must learn of it
            logger.exception("run %d failed in the agent", self.run_id)
            reason = f"the agent failed: {type(error).__name__}: {error}"
            outcome = Outcome(EXIT_INFRASTRUCTURE, reason)
        # On several machines the others are stopped because a rank here may have failed.
        cause = self._item.spec.nodes is not None and failed_by_itself(outcome)
        if self._stop.is_set() and not cause:
            outcome = _not_blamed(outcome)
        try:
            self._folder.create()
            write_outcome(self._folder.path, outcome)
            if outcome.reason:
                self._folder.say(outcome.reason)
        except OSError:  # a full disk, maybe; the server learns of it all the same
            logger.exception("run %d: how it ended cannot be written down", self.run_id)
        logger.info("run %d ended with code %d", self.run_id, outcome.exit_code)
        finish_run(self._folder, self.run_id, self._client, self._closing, outcome, node=self._node)
        self.ended_at = time.monotonic()

    def _execute(self) -> Outcome:
        named = self._item.spec.python
        problem = interpreter_problem(named) if named else None
        if problem is not None:
            return Outcome(EXIT_USER_ERROR, problem)
        with self._shown("its agent unpacks the model directory"):
            refused = self._prepare()
        if refused is not None:
            return refused
        if self._stop.is_set():
            return _STOPPED_EARLY
        with self._shown("its agent imports torch"):
            process = self._launcher.start(self._folder, self._environment)
        logger.info("run %d started as process %d", self.run_id, process.pid)
        over = threading.Event()
        teller = threading.Thread(target=self._tell, args=(over,), daemon=True)
        teller.start()
        try:
            code = process.poll()
            while code is None:
                if self._stop.wait(_POLL_S):
                    code = self._launcher.stop(process, self._grace_s)
                else:
                    code = process.poll()
        finally:
            over.set()
        self._launcher.sweep(self._folder)
        teller.join()
        return read_outcome(self._folder.path) or _outcome_without_launcher(code)

    @contextlib.contextmanager
    def _shown(self, activity: str) -> Iterator[None]:
        """Show what the run waits for, as the activity of its trial, if the block takes long."""

        def show() -> None:
            with contextlib.suppress(ZerolabError):
                self._client.run_activity(self.run_id, activity)

        timer = threading.Timer(_SHOWN_AFTER_S, show)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _prepare(self) -> Outcome | None:
        """Make the run's directory; return why it cannot be, if so."""
        folder = self._folder
        folder.create()
        nodes = self._meet(self._item.spec.nodes)
        if nodes is None and self._item.spec.nodes is not None:
            return _STOPPED_EARLY
        spec = msgspec.structs.replace(
            self._item.spec,
            nodes=nodes,
            model_dir=str(folder.model),
            run_dir=str(folder.path),
            checkpoint_cache=str(self._cache),
            master=self._client.url,
        )
        write_run_spec(spec, folder.spec)
        refused = _storage_problem(spec)
        if refused is not None:
            return refused
        fetched: list[bytes] = []

        def fetch() -> None:
            fetched.append(self._client.download_archive(self._item.archive))

        try:
            if not _until_reached(fetch, self._stop):
                return _STOPPED_EARLY
            unpack(fetched[0], folder.model)
        except ZerolabError as error:
            return Outcome(EXIT_USER_ERROR, f"the model directory cannot be unpacked: {error}")
        except OSError as error:
            return Outcome(EXIT_INFRASTRUCTURE, f"the model directory cannot be written: {error}")
        return None

    def _meet(self, nodes: Nodes | None) -> Nodes | None:
        """Say where the ranks meet, if it is here; None when the run is stopped before."""
        if nodes is None or nodes.rank > 0:
            return nodes and as_seen_from_here(nodes, self._client.url)
        place = offer_place(self._client.url)
        if not _until_reached(lambda: self._client.run_meeting(self.run_id, place), self._stop):
            return None
        return Nodes(nodes.slots, 0, place.address, place.port)

    def _tell(self, over: threading.Event) -> None:
        """Tell the server that the run is there, and ship its logs while it runs."""
        shipper = LogShipper(self._folder, self.run_id, self._client, self._node)
        try:
            _until_reached(lambda: self._client.run_started(self.run_id), over)
            while not over.wait(_SHIP_S):
                _until_reached(shipper.ship, over)
        except (NotFoundError, ConflictError) as error:
            logger.info("run %d: the server wants nothing of it: %s", self.run_id, error)
        except (ZerolabError, OSError):
            logger.exception("run %d: logs are not shipped while it runs", self.run_id)


def _storage_problem(spec: RunSpec) -> Outcome | None:
    """Say why nothing can be saved to, or gone on from, on this machine."""
    storage = StorageAddress(root=spec.checkpoint_dir, options=spec.storage_options)
    missing = missing_package(storage)
    if missing is not None:
        return Outcome(EXIT_USER_ERROR, f"the checkpoint storage cannot be opened: {missing}")
    ref = spec.latest_checkpoint
    if ref is None or not ref.saved_on:
        return None
    place = ref.storage or storage
    if place.is_remote or Path(place.root.removeprefix("file://"), ref.uuid).is_dir():
        return None
    reason = (
        f"checkpoint {ref.uuid}, from which the trial goes on, is not on {socket.gethostname()}: "
        f"it was saved in {place.root} on {ref.saved_on}; mount or copy it there, or give that "
        "agent back; for new experiments set checkpoint_storage to a directory that every machine "
        "sees at the same path, or to an object store (type: s3)"
    )
    return Outcome(EXIT_INFRASTRUCTURE, reason)


def _not_blamed(outcome: Outcome) -> Outcome:
    """How a run ended that was told to: a death is then no failure of the trial.

    It may have come before the ranks could heed SIGTERM, or when their time was over.
    """
    if outcome.exit_code == 0 or outcome.exit_code in DELIBERATE_EXITS:
        return outcome
    reason = f"the run was stopped: {outcome.reason or f'exit code {outcome.exit_code}'}"
    return Outcome(EXIT_INFRASTRUCTURE, reason, outcome.rank, told=True)


def leftover_runs(runs: Path, launcher: Launcher) -> list[tuple[int, RunFolder]]:
    """Find runs that an earlier agent has not brought to their end.

    Their processes, if there still are any, are killed; a run without an outcome gets one.
    """
    found = []
    for path in sorted(runs.iterdir() if runs.is_dir() else ()):
        folder = RunFolder(path)
        if not path.name.isdecimal() or folder.delivered.exists():
            continue
        folder.create()  # it may have died in the middle of that
        launcher.sweep(folder)
        if read_outcome(path) is None:
            outcome = Outcome(EXIT_INFRASTRUCTURE, "the agent ended while the run was going on")
            write_outcome(path, outcome)
            folder.say(str(outcome.reason))
        found.append((int(path.name), folder))
    return found


def finish_run(
    folder: RunFolder,
    run_id: int,
    client: Client,
    closing: threading.Event,
    outcome: Outcome | None = None,
    *,
    node: int | None = None,
) -> bool:
    """Deliver all that a run has left: reports, logs, and last how it ended.

    Tries for as long as it takes, until ``closing`` is set and the server still does not answer.
    Logs and reports that an answering server fails to take are left out in the end; how the run
    ended never is: a server that does not know it would have the run started again.

    Args:
        folder: Of the run.
        run_id: Its number.
        client: The server.
        closing: Ends the waiting.
        outcome: How it ended; what stands in the folder when None.
        node: Node rank of this agent; what the run spec in the folder says when None.

    Returns:
        Whether the server knows the end now, or wants nothing of this run any more.
    """
    node = _node_of(folder) if node is None else node
    shipper = LogShipper(folder, run_id, client, node)
    if outcome is None:
        outcome = read_outcome(folder.path) or Outcome(1, "the run left no outcome")
    tail_of_log = _log_tail(folder, outcome)
    end = RunExit(
        outcome.exit_code, outcome.reason, tail_of_log, node, told=outcome.told,
        unread_hparams=read_unread(folder.path),
    )  # fmt: skip
    steps: list[tuple[Callable[[], object], float]] = [
        (lambda: deliver(folder.path, client, run_id, folder.say), _TRIES),
        (lambda: shipper.ship(final=True), _TRIES),
        (lambda: client.run_exited(run_id, end), math.inf),
    ]
    for step, tries in steps:
        try:
            if not _until_reached(step, closing, tries):
                return False
        except (NotFoundError, ConflictError) as error:
            logger.info("run %d: the server wants nothing more: %s", run_id, error)
        except (ZerolabError, OSError):  # of the rest as much as possible: the end above all
            logger.exception("run %d: not all of its rest can be delivered", run_id)
    try:
        write_json(folder.delivered, {"exit_code": outcome.exit_code})
    except OSError:  # then the next agent tells the server once more, which changes nothing
        logger.exception("run %d: cannot be marked as delivered", run_id)
    _remove_tree(folder.model)
    return True


def _until_reached(action: Callable[[], object], stop: _Stoppable, tries: float = 1) -> bool:
    """Do something as soon as the server can be reached; return False when ``stop`` comes first.

    Args:
        action: Asks the server for something.
        stop: Ends the waiting.
        tries: How often a server that answers may fail at it before that is raised.
    """
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            action()
        except (NotFoundError, ConflictError):
            raise
        except UnreachableError as error:
            logger.warning("%s", error)
        except ZerolabError as error:
            tries -= 1
            if tries <= 0:
                raise
            logger.warning("%s", error)
        else:
            return True
        if stop.wait(backoff.pause_s()):
            return False


def _node_of(folder: RunFolder) -> int:
    """Node rank of this agent, as the run spec has it; 0 where there is no other agent."""
    try:
        nodes = read_run_spec(folder.spec).nodes
    except (OSError, msgspec.DecodeError):  # it never came to that
        return 0
    return nodes.rank if nodes is not None else 0


def _outcome_without_launcher(code: int) -> Outcome:
    if code in DELIBERATE_EXITS:
        return Outcome(code, "why could not be written down; is the disk of this machine full?")
    if code < 0:
        return Outcome(code, f"the launcher was killed by {signal_text(-code)}")
    return Outcome(code or 1, f"the launcher ended with code {code}; see logs/launcher.log")


def _log_tail(folder: RunFolder, outcome: Outcome) -> str:
    """Return the end of what the rank that failed wrote, or of the launcher's own output."""
    if outcome.exit_code == 0:
        return ""
    ranks = [outcome.rank] if outcome.rank is not None else sorted(folder.rank_pids())
    tails = (tail(folder.stderr(rank), _FINAL_TAIL_LINES) for rank in ranks)
    written = next((text for text in tails if text.strip()), "")
    return written or tail(folder.launcher_log, _FINAL_TAIL_LINES)


def _remove_tree(path: Path) -> None:
    import shutil

    with contextlib.suppress(OSError):
        shutil.rmtree(path)
