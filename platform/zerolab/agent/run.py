"""Execution of a run on this machine, from its archive to the report of its outcome."""

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from zerolab.agent.logs import LogShipper
from zerolab.agent.rendezvous import offer_rendezvous, replace_loopback
from zerolab.client.archive import unpack
from zerolab.client.http import Client
from zerolab.client.transport import Backoff
from zerolab.contract.hparam_reads import read_unread
from zerolab.contract.messages import RunExit, SlotInfo, WorkItem
from zerolab.contract.outcome import (
    DELIBERATE_EXITS,
    Outcome,
    failed_by_itself,
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
from zerolab.linux import usable_cores
from zerolab.reports.media_files import deliver_media
from zerolab.reports.sender import deliver

__all__ = ["Run", "finish_run", "leftover_runs", "run_environment"]

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SHIP_S = 0.3
_SHOWN_AFTER_S = 1.0
"""Steps of a start that take at least this many seconds are shown."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_FINAL_TAIL_LINES = 100
_TRIES = 20
"""Attempts of a step that fails although the server responds; about 30 s."""
_MEDIA_TRIES = 3
"""Attempts to store media; object stores are retried within each. The run's slots are in use."""

_STOPPED_EARLY = Outcome(EXIT_INFRASTRUCTURE, "the run was stopped before it started")


class _Stoppable(Protocol):
    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Run:
    """Executes a run of this agent in a thread.

    Args:
        item: The run.
        folder: Its directory; created here.
        client: Client of the server.
        environment: Variables for the ranks: threads, devices.
        launcher: Starts the ranks.
        closing: Set when the agent ends: undelivered data then stays on disk.
        cache: Directory for files in transfer to and from an object store.
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
        """Time at which the server acknowledged the outcome, on the monotonic clock."""
        self._stop = threading.Event()
        self._grace_s = 0.0
        self._thread = threading.Thread(target=self._main, name=f"run-{item.run_id}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Stop the ranks with SIGTERM, and kill them ``grace_s`` seconds later."""
        if not self._stop.is_set():
            self._grace_s = grace_s
            self._stop.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, up to a timeout; return whether the run has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def rank_slots(self) -> dict[int, Sequence[int]]:
        """Return the slots of each rank on this machine, by the id of the rank's process."""
        if self._item.spec.hosts or not self._thread.is_alive():
            return {}
        slots, pids = self._item.slot_ids, list(self._folder.rank_pids().values())
        per_rank = max(1, len(slots) // max(1, len(pids)))
        return {pid: slots[at * per_rank :][:per_rank] for at, pid in enumerate(pids)}

    def _main(self) -> None:
        try:
            outcome = self._execute()
        except Exception as error:  # the thread's boundary: the server must know
            logger.exception("run %d failed in the agent", self.run_id)
            reason = f"the agent failed: {type(error).__name__}: {error}"
            outcome = Outcome(EXIT_INFRASTRUCTURE, reason)
        # Of a run on several machines, a failed rank here may be why the others are stopped.
        failed_here = self._item.spec.nodes is not None and failed_by_itself(outcome)
        if self._stop.is_set() and not failed_here:
            outcome = _as_stopped(outcome)
        try:
            self._folder.create()
            write_outcome(self._folder.path, outcome)
            if outcome.reason:
                self._folder.log(outcome.reason)
        except OSError:  # perhaps a full disk; the outcome is still reported
            logger.exception("run %d: could not save the outcome", self.run_id)
        logger.info("run %d ended with code %d", self.run_id, outcome.exit_code)
        finish_run(self._folder, self.run_id, self._client, self._closing, outcome, node=self._node)
        self.ended_at = time.monotonic()

    def _execute(self) -> Outcome:
        named = self._item.spec.python
        problem = interpreter_problem(named) if named else None
        if problem is not None:
            return Outcome(EXIT_USER_ERROR, problem)
        with self._shown_activity("its agent unpacks the model directory"):
            failure = self._prepare()
        if failure is not None:
            return failure
        if self._stop.is_set():
            return _STOPPED_EARLY
        with self._shown_activity("loading torch"):
            process = self._launcher.start(self._folder, self._environment)
        logger.info("run %d started as process %d", self.run_id, process.pid)
        ended = threading.Event()
        reporter = threading.Thread(target=self._report_and_ship_logs, args=(ended,), daemon=True)
        reporter.start()
        try:
            code = process.poll()
            while code is None:
                if self._stop.wait(_POLL_S):
                    code = self._launcher.stop(process, self._grace_s)
                else:
                    code = process.poll()
        finally:
            ended.set()
        self._launcher.sweep(self._folder)
        reporter.join()
        return read_outcome(self._folder.path) or _outcome_if_not_saved(code)

    @contextlib.contextmanager
    def _shown_activity(self, activity: str) -> Iterator[None]:
        """Show an activity of the trial while the block runs, if it takes long."""

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
        """Create the run's directory; return the outcome if that fails."""
        folder = self._folder
        folder.create()
        nodes = self._exchange_rendezvous(self._item.spec.nodes)
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
            if not _retry_until_reached(fetch, self._stop):
                return _STOPPED_EARLY
            unpack(fetched[0], folder.model)
        except ZerolabError as error:
            return Outcome(EXIT_USER_ERROR, f"the model directory cannot be unpacked: {error}")
        except OSError as error:
            return Outcome(EXIT_INFRASTRUCTURE, f"the model directory cannot be written: {error}")
        return None

    def _exchange_rendezvous(self, nodes: Nodes | None) -> Nodes | None:
        """Report the rendezvous address if this is node 0; None after a stop."""
        if nodes is None or nodes.rank > 0:
            return nodes and replace_loopback(nodes, self._client.url)
        address = offer_rendezvous(self._client.url)
        if not _retry_until_reached(
            lambda: self._client.run_meeting(self.run_id, address), self._stop
        ):
            return None
        return Nodes(nodes.slots, 0, address.address, address.port)

    def _report_and_ship_logs(self, ended: threading.Event) -> None:
        """Report that the run has started, and ship its logs while it runs."""
        shipper = LogShipper(self._folder, self.run_id, self._client, self._node)
        try:
            _retry_until_reached(lambda: self._client.run_started(self.run_id), ended)
            while not ended.wait(_SHIP_S):
                _retry_until_reached(shipper.ship, ended)
        except (NotFoundError, ConflictError) as error:
            logger.info(
                "run %d: the server rejected the run (it ended or was superseded): %s",
                self.run_id,
                error,
            )
        except (ZerolabError, OSError):
            logger.exception("run %d: could not ship logs while it runs", self.run_id)


def _storage_problem(spec: RunSpec) -> Outcome | None:
    """Return an outcome if checkpoints cannot be saved or loaded on this machine."""
    storage = StorageAddress(root=spec.checkpoint_dir, options=spec.storage_options)
    if storage.is_remote:
        # Imported lazily: most agents have no run with an object store.
        from zerolab.storage.registry import storage_problem

        problem = storage_problem(storage)
        if problem is not None:
            return Outcome(EXIT_USER_ERROR, f"the checkpoint storage cannot be opened: {problem}")
    ref = spec.latest_checkpoint
    if ref is None or not ref.saved_on:
        return None
    address = ref.storage or storage
    if address.is_remote or Path(address.root.removeprefix("file://"), ref.uuid).is_dir():
        return None
    reason = (
        f"checkpoint {ref.uuid}, from which the trial resumes, is not on {socket.gethostname()}: "
        f"it was saved in {address.root} on {ref.saved_on}; mount or copy it there, or bring "
        "that agent online again; for new experiments set checkpoint_storage to a directory that "
        "every machine sees at the same path, or to an object store (type: s3)"
    )
    return Outcome(EXIT_INFRASTRUCTURE, reason)


def _as_stopped(outcome: Outcome) -> Outcome:
    """Return the outcome of a stopped run: a killed rank is then not a failure of the trial.

    The signal may arrive before the ranks handle SIGTERM, or after their grace period.
    """
    if outcome.exit_code == 0 or outcome.exit_code in DELIBERATE_EXITS:
        return outcome
    reason = f"the run was stopped: {outcome.reason or f'exit code {outcome.exit_code}'}"
    return Outcome(EXIT_INFRASTRUCTURE, reason, outcome.rank, was_stopped=True)


def leftover_runs(runs: Path, launcher: Launcher) -> list[tuple[int, RunFolder]]:
    """Find unfinished runs of an earlier agent.

    Remaining processes are killed; a run without an outcome gets one.
    """
    leftover = []
    for path in sorted(runs.iterdir() if runs.is_dir() else ()):
        folder = RunFolder(path)
        if not path.name.isdecimal() or folder.delivered.exists():
            continue
        folder.create()  # the agent may have died while creating it
        launcher.sweep(folder)
        if read_outcome(path) is None:
            outcome = Outcome(EXIT_INFRASTRUCTURE, "the agent ended during the run")
            write_outcome(path, outcome)
            folder.log(str(outcome.reason))
        leftover.append((int(path.name), folder))
    return leftover


def finish_run(
    folder: RunFolder,
    run_id: int,
    client: Client,
    closing: threading.Event,
    outcome: Outcome | None = None,
    *,
    node: int | None = None,
) -> bool:
    """Deliver the remaining reports and logs of a run, and then its outcome.

    Retries until it succeeds, or until ``closing`` is set and the server still does not respond.
    Logs and reports that a responding server cannot store are dropped after some retries. The
    outcome is never dropped: without it the server would start the run again.

    Args:
        folder: Directory of the run.
        run_id: Id of the run.
        client: Client of the server.
        closing: Ends the waiting.
        outcome: Outcome of the run; read from the folder if None.
        node: Node rank of this agent; read from the run specification if None.

    Returns:
        Whether the server has the outcome, or rejected the run.
    """
    node = _node_of(folder) if node is None else node
    shipper = LogShipper(folder, run_id, client, node)
    if outcome is None:
        outcome = read_outcome(folder.path) or Outcome(1, "the run left no outcome")
    tail_of_log = _log_tail(folder, outcome)
    end = RunExit(
        outcome.exit_code, outcome.reason, tail_of_log, node, was_stopped=outcome.was_stopped,
        unread_hparams=read_unread(folder.path),
    )  # fmt: skip
    steps: dict[str, tuple[Callable[[], object], float]] = {
        "media": (lambda: deliver_media(folder.path), _MEDIA_TRIES),
        "reports": (lambda: deliver(folder.path, client, run_id, folder.log), _TRIES),
        "logs": (lambda: shipper.ship(final=True), _TRIES),
        "outcome": (lambda: client.run_exited(run_id, end), math.inf),
    }
    for name, (step, tries) in steps.items():
        try:
            if not _retry_until_reached(step, closing, tries):
                return False
        except (NotFoundError, ConflictError) as error:
            logger.info(
                "run %d: the server rejected the %s (the run ended or was superseded): %s",
                run_id,
                name,
                error,
            )
        except (ZerolabError, OSError) as error:  # deliver the rest, above all the outcome
            logger.exception("run %d: could not deliver the %s", run_id, name)
            if name == "media":  # logs are delivered later
                folder.log(f"some media are not in the storage but in {folder.path}: {error}")
    try:
        write_json(folder.delivered, {"exit_code": outcome.exit_code})
    except OSError:  # the next agent then repeats the report, which has no effect
        logger.exception("run %d: could not mark the run as delivered", run_id)
    _remove_tree(folder.model)
    return True


def _retry_until_reached(action: Callable[[], object], stop: _Stoppable, tries: float = 1) -> bool:
    """Repeat an action until the server is reachable; return False if ``stop`` is set first.

    Args:
        action: Sends a request.
        stop: Ends the waiting.
        tries: Number of failures with a responding server before the error is raised.
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
    """Return the node rank of this agent from the run specification; 0 for a single agent."""
    try:
        nodes = read_run_spec(folder.spec).nodes
    except (OSError, msgspec.DecodeError):  # the run specification was never written
        return 0
    return nodes.rank if nodes is not None else 0


def _outcome_if_not_saved(code: int) -> Outcome:
    if code in DELIBERATE_EXITS:
        return Outcome(code, "the reason could not be saved; is this machine's disk full?")
    if code < 0:
        return Outcome(code, f"the launcher was killed by {signal_text(-code)}")
    return Outcome(code or 1, f"the launcher ended with code {code}; see logs/launcher.log")


def _log_tail(folder: RunFolder, outcome: Outcome) -> str:
    """Return the end of the failed rank's output, or of the launcher's output."""
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


def run_environment(slots: Sequence[SlotInfo], slot_ids: Sequence[int]) -> dict[str, str]:
    """Return the variables that confine a run to its slots.

    Args:
        slots: All slots of this machine; the cores are divided among them for the ranks' threads.
        slot_ids: Slots of the run.
    """
    threads = max(1, usable_cores() // len(slots))
    environment = {"OMP_NUM_THREADS": str(threads)}
    if any(slot.device.startswith("cuda") for slot in slots):
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of the slots' numbers
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(slot) for slot in slot_ids)
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
