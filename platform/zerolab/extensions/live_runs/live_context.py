"""Context of a script that reports to a server and was not started by Zerolab."""

import atexit
import contextlib
import datetime
import logging
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import msgspec

from zerolab.agent.logs import LogShipper
from zerolab.client.http import Client
from zerolab.contract.spec import CheckpointRef, RunSpec
from zerolab.contract.storage import StorageAddress
from zerolab.core.context import Context
from zerolab.core.preemption import DirectivePoller
from zerolab.core.socket_ranks import SocketRanks
from zerolab.errors import StaleRunError, UnreachableError, ZerolabError
from zerolab.extensions.live_runs.connection import LiveConnection
from zerolab.extensions.live_runs.delivery import finish_delivery
from zerolab.extensions.live_runs.run_directory import (
    LIVE_DIR,
    LiveDirectory,
    LiveRunInfo,
    check_id,
)
from zerolab.files import append_private
from zerolab.paths import Home, token_of
from zerolab.reports.reporter import Reporter, json_metadata
from zerolab.storage.store import CheckpointStore, local_owner

__all__ = ["LiveContext", "init_live"]

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 60.0
_INTERVAL_S = 1.0
_POLL_S = 20.0
"""Maximum wait of a request for the directive."""
_PAUSE_S = 10.0
"""Pause after a failed request of the background thread."""


def init_live(
    *,
    server: str,
    token: str = "",
    name: str = "",
    id: str = "",  # noqa: A002 - the name that other trackers use
    labels: Sequence[str] = (),
    project: str = "",
    create_project: bool = False,
    description: str = "",
    hparams: Mapping[str, Any] | None = None,
    directory: Path | str | None = None,
    timeout_s: float = 1800.0,
    ranks: SocketRanks | None = None,
    handle_sigterm: bool = True,
) -> "LiveContext":
    """Start a run that reports to a server.

    **Collective**: under torchrun every rank calls it.

    Args:
        server: Address of the server; empty to only write to disk, for ``zerolab sync``.
        token: Token of a user; by default ``ZEROLAB_TOKEN``, or the token of the installation.
        name: Name of the experiment; by default that of the script.
        id: Id of the run; a script that uses it again continues the experiment.
        labels: Labels of a new experiment.
        project: Project of a new experiment; by default ``default``.
        create_project: Whether to create the project if it is missing.
        description: Description of a new experiment.
        hparams: Hyperparameters.
        directory: Directory for the reports until they are sent.
        timeout_s: Maximum wait for the other ranks in a collective, in seconds.
        ranks: Ranks of the run; by default those of torchrun's variables.
        handle_sigterm: Whether SIGTERM requests preemption, instead of ending the process.

    Raises:
        ConfigError: If an argument is invalid.
    """
    client = Client(server, token or token_of(Home.default())) if server else None
    distributed = ranks or SocketRanks.from_environment(timeout_s=timeout_s)
    now = datetime.datetime.now(datetime.UTC)
    session = f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    info = LiveRunInfo(
        id=check_id(id) if id else session,
        session=session,
        name=name or script.lstrip("-") or Path.cwd().name,
        description=description,
        labels=list(labels),
        project=project,
        create_project=create_project,
        hparams=json_metadata(hparams or {}),
        server=server,
    )
    path = Path(directory) if directory is not None else Path.cwd() / LIVE_DIR
    chosen = Path(distributed.broadcast(str(path.absolute() / session)))
    live = LiveDirectory.create(chosen, info) if distributed.is_chief else None
    return LiveContext(info, distributed, chosen, live, client, handle_sigterm=handle_sigterm)


class LiveContext(Context):
    """Context of a live run; use it in a ``with`` block, or call :meth:`finish`.

    Args:
        info: Description of the run.
        distributed: Ranks of the run.
        path: Directory of the run.
        directory: The same on the chief, None on other ranks.
        client: Client of the server; None if the run is offline.
        handle_sigterm: Whether SIGTERM requests preemption, instead of ending the process.
    """

    def __init__(
        self,
        info: LiveRunInfo,
        distributed: SocketRanks,
        path: Path,
        directory: LiveDirectory | None,
        client: Client | None,
        *,
        handle_sigterm: bool = True,
    ) -> None:
        self._live_info = info
        self._directory = directory
        self._connection: LiveConnection | None = None
        if directory is not None and client is not None:
            self._connection = LiveConnection(directory, client, replace=True)
        # A run with an id finds the checkpoints of its earlier sessions.
        root = path / "checkpoints"
        if info.id != info.session:
            root = path.parent / "checkpoints" / info.id
        address = StorageAddress(root=str(root))
        store = CheckpointStore(
            address, owner=local_owner(address, str(path)), local=str(path / "cache")
        )
        latest = store.latest() if distributed.is_chief else None
        fields: list[Any] | None = [latest.uuid, latest.steps_completed] if latest else None
        checkpoint = distributed.broadcast(fields)
        spec = RunSpec(
            experiment_id=0,
            trial_id=0,
            run_id=0,
            config={"name": info.name, "hyperparameters": info.hparams},
            hparams=info.hparams,
            trial_seed=0,
            slots=distributed.size,
            model_dir=str(Path.cwd()),
            run_dir=str(path),
            checkpoint_dir=address.root,
            latest_checkpoint=CheckpointRef(*checkpoint) if checkpoint else None,
        )
        reporter = _LiveReporter(spec, self._connection) if directory is not None else None
        super().__init__(spec, distributed, store, platform=False, reporter=reporter)
        if not handle_sigterm:
            self._sigterm.restore()
        self._ended = False
        self._failure: str | None = None
        """Error that ended the script without :meth:`finish`."""
        self._output: _OutputCapture | None = None
        self._updates: _Updates | None = None
        self._stop_requests: _StopRequests | None = None
        if directory is not None:
            self._output = _OutputCapture(directory)
            if self._connection is not None:
                self._updates = _Updates(directory, self._connection)
                self._updates.start()
                assert self._poller is not None
                self._stop_requests = _StopRequests(self._connection, self._poller)
                self._stop_requests.start()
        self._excepthook = sys.excepthook
        sys.excepthook = self._note_exception
        atexit.register(self._finish_at_exit)

    @property
    def id(self) -> str:
        """Id of the run."""
        return self._live_info.id

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self._live_info.name

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return Path(self.info.run_dir)

    @property
    def server_ids(self) -> tuple[int, int]:
        """Ids of the experiment and the trial; 0 until the server has them."""
        connection = self._connection
        return (connection.experiment_id, connection.trial_id) if connection else (0, 0)

    @property
    def page(self) -> str:
        """Address of the experiment in the web page; empty until the server has it."""
        connection = self._connection
        return connection.page if connection is not None and connection.experiment_id else ""

    def connect(self) -> int:
        """Open the run on the server now, instead of with the first report.

        Returns:
            The first step that the run has not reported: 0 for a new run, and without a server.

        Raises:
            ZerolabError: If the server rejects the token or the run.
        """
        if self._connection is None:
            return 0
        try:
            self._connection.open()
        except UnreachableError as error:
            logger.warning("reports stay in %s for now: %s", self.directory, error)
            return 0
        return self._connection.first_step

    def set_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Replace the hyperparameters; they are sent in the background."""
        values = json_metadata(hparams)
        self._live_info = msgspec.structs.replace(self._live_info, hparams=values)
        if self._directory is not None:
            self._directory.write_info(self._live_info)
        if self._updates is not None:
            self._updates.hparams_changed.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Send the remaining reports and end the run."""
        self.finish(error=_reason(kind, error))

    def close(self, timeout_s: float = 30.0) -> None:
        """Send the remaining reports and end the run, as :meth:`finish` does."""
        self.finish(timeout_s=timeout_s)

    def finish(self, *, error: str | None = None, timeout_s: float = 30.0) -> None:
        """Send the remaining reports and end the run.

        Args:
            error: Why the script failed; None if it completed.
            timeout_s: Maximum wait for the server, in seconds.
        """
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self._finish_at_exit)
        if sys.excepthook == self._note_exception:
            sys.excepthook = self._excepthook
        if self._output is not None:
            self._output.restore()
        stale = self._reporter is not None and self._reporter.stale.is_set()
        reporter, self._reporter = self._reporter, None  # closed here
        super().close(timeout_s)
        if self._directory is None or reporter is None:
            return
        self._directory.write_end(error)
        if self._updates is not None:
            self._updates.stop()
        if self._stop_requests is not None:
            self._stop_requests.stopping.set()
        sent = reporter.close(timeout_s) and self._connection is not None
        stale = stale or reporter.stale.is_set()
        if sent and not stale:
            sent = self._send_end(self._connection)
        self._directory.lock.release()
        path = self._directory.path
        if stale:
            _print("zerolab: the server does not accept more reports of this run")
        elif sent:
            _print(f"zerolab: reported to {self.page}")
        else:
            _print(f"zerolab: reports that were not sent are in {path}; run `zerolab sync {path}`")

    def _send_end(self, connection: LiveConnection | None) -> bool:
        assert connection is not None
        assert self._directory is not None
        try:
            connection.set_hparams(self._live_info.hparams)
            finish_delivery(self._directory, connection)
        except ZerolabError as error:
            logger.warning("cannot report the end of the run: %s", error)
            return False
        return True

    def _note_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._failure = _reason(kind, error)
        self._excepthook(kind, error, trace)

    def _finish_at_exit(self) -> None:
        self.finish(error=self._failure)


class _LiveReporter(Reporter):
    """Reporter that keeps checkpoints local: the server cannot read the disk of this machine."""

    def __init__(self, spec: RunSpec, connection: LiveConnection | None) -> None:
        super().__init__(spec, target=connection, spool_only=True)

    def report_checkpoint(
        self,
        uuid: str,
        steps_completed: int,
        resources: Mapping[str, int],
        metadata: Mapping[str, Any],
    ) -> None:
        """Validate the metadata; the checkpoint is not reported."""
        del uuid, steps_completed, resources
        json_metadata(metadata)


class _Updates(threading.Thread):
    """Thread that sends log lines, hyperparameters and heartbeats; it never fails the script."""

    def __init__(self, directory: LiveDirectory, connection: LiveConnection) -> None:
        super().__init__(name="zerolab-live", daemon=True)
        self._directory = directory
        self._connection = connection
        self._stopping = threading.Event()
        self.hparams_changed = threading.Event()

    def run(self) -> None:
        """Send until :meth:`stop`."""
        shipper = LogShipper(self._directory.folder, 0, self._connection)
        pause_s, next_heartbeat = 0.0, 0.0
        while not self._stopping.wait(pause_s):
            pause_s = _INTERVAL_S
            try:
                if time.monotonic() >= next_heartbeat:
                    self._connection.keep_alive()
                    next_heartbeat = time.monotonic() + _HEARTBEAT_S
                if self.hparams_changed.is_set():
                    self.hparams_changed.clear()
                    self._connection.set_hparams(self._directory.read_info().hparams)
                shipper.ship()
            except StaleRunError as error:
                logger.info("no more updates: %s", error)
                return
            except Exception as error:  # noqa: BLE001 - training must continue, whatever fails here
                logger.debug("retrying: %s", error)
                self.hparams_changed.set()
                pause_s = _PAUSE_S

    def stop(self) -> None:
        """Stop after the current request."""
        self._stopping.set()
        self.join(_PAUSE_S)


class _StopRequests(threading.Thread):
    """Thread that waits until the server asks the script to stop."""

    def __init__(self, connection: LiveConnection, poller: DirectivePoller) -> None:
        super().__init__(name="zerolab-stop-requests", daemon=True)
        self._connection = connection
        self._poller = poller
        self.stopping = threading.Event()

    def run(self) -> None:
        """Poll until the server asks to stop, or the run ends."""
        version: int | None = None
        while not self.stopping.is_set():
            try:
                directive = self._connection.directive(version, _POLL_S)
            except Exception as error:  # noqa: BLE001 - training must continue, whatever fails here
                logger.debug("retrying: %s", error)
                self.stopping.wait(_PAUSE_S)
                continue
            version = directive.version
            self._poller.directive = directive
            if directive.action != "train":
                reason = directive.cause or directive.action
                logger.warning("the server asks this script to stop (%s)", reason)
                return


class _OutputCapture:
    """Copies standard output and standard error of the script to the log files of the run."""

    def __init__(self, directory: LiveDirectory) -> None:
        self._streams = {
            "stdout": _Copy(sys.stdout, directory.folder.stdout(0)),
            "stderr": _Copy(sys.stderr, directory.folder.stderr(0)),
        }
        for name, stream in self._streams.items():
            setattr(sys, name, stream)

    def restore(self) -> None:
        """Restore the streams, unless somebody else has replaced them since."""
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.original)
            stream.stop()


class _Copy:
    """Text stream that also appends to a file."""

    def __init__(self, original: TextIO, path: Path) -> None:
        self.original = original
        self._file: Any = append_private(path)

    def write(self, text: str) -> int:
        """Write to both."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(text.encode(errors="replace"))
                self._file.flush()
        return self.original.write(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def stop(self) -> None:
        """Write only to the original from now on."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def _reason(kind: type[BaseException] | None, error: BaseException | None) -> str | None:
    if kind is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    text = " ".join(str(error).split())
    return f"{kind.__name__}: {text}"[:2000] if text else kind.__name__


def _print(line: str) -> None:
    """Print to standard error, as a program may parse the script's standard output."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - for the user of a script
