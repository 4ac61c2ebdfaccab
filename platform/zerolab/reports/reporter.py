"""Reporter of a run: writes records to disk immediately, and uploads them in the background.

With a server the records go to a spool (:mod:`zerolab.reports.spool`) and from there over HTTP.
Without one they go to ``metrics.jsonl`` in the run's directory, which ``zerolab import`` loads into
a server later. Either way a report costs microseconds and survives the death of the process.
"""

import logging
import math
import operator
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from zerolab.client.http import Client
from zerolab.contract.media import (
    MAX_MEDIA,
    MAX_MEDIA_BYTES,
    MAX_POSITIONS,
    MediaRecord,
    media_name_problem,
    media_problem,
)
from zerolab.contract.messages import (
    AlertRecord,
    CheckpointRecord,
    MetricsRecord,
    ProgressRecord,
    Record,
    StateRecord,
    wire_number,
)
from zerolab.contract.names import metric_name_problem
from zerolab.contract.notifications import alert_text
from zerolab.contract.spec import RunSpec
from zerolab.errors import ConfigError, one_line
from zerolab.formatting import size_text
from zerolab.reports.media_files import (
    MEDIA_DIR,
    MediaFiles,
    MediaItem,
    MediaTarget,
    MediaUploader,
)
from zerolab.reports.metrics_file import MetricsFile
from zerolab.reports.sender import ReportTarget, Sender, SpoolUploader
from zerolab.reports.spool import SPOOL_DIR, Spool, SpoolReader
from zerolab.storage.media import MediaStore

__all__ = ["METRICS_FILE", "SPOOL_DIR", "LiveTarget", "Reporter", "json_metadata"]

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_MAX_NAMES = 10_000  # checked names kept in memory
_MAX_BUFFERED = 10_000  # records kept in memory while the disk is full


class _Sink(Protocol):
    def encode(self, record: Record) -> bytes: ...
    def append(self, payload: bytes) -> None: ...
    def close(self) -> None: ...


class LiveTarget(ReportTarget, MediaTarget, Protocol):
    """Receiver of reports and media."""


class Reporter:
    """Reports of one run; created by its chief only, and used from any of its threads.

    No method waits for the server or fails because of it, nor because the disk is full. In that
    case the newest 10,000 records are kept in memory until there is space, with a warning.

    Args:
        spec: The run. Without ``spec.master`` the reports stay in a local file.
        longest_pause_s: Maximum delay between retries while the server is unreachable, in seconds.
        target: Receiver of reports and media; by default the server and the storage of ``spec``.
        spool_only: Write to the spool, even if there is neither a server nor a target.
    """

    newest_open: ClassVar["Reporter | None"] = None
    """Newest reporter of this process that is not closed."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        longest_pause_s: float = 10.0,
        target: LiveTarget | None = None,
        spool_only: bool = False,
    ) -> None:
        run_dir = Path(spec.run_dir)
        self.spec = spec
        """The run."""
        self._lock = threading.Lock()
        self._buffered: deque[bytes] = deque()
        self._invalid_names: set[str] = set()
        self._valid_names: set[str] = set()
        """Checked names of metrics and groups."""
        self._media_files = MediaFiles(run_dir / MEDIA_DIR)
        self._media_uploader: MediaUploader | None = None
        self._media_count = self._media_bytes = 0
        self._media_positions: dict[str, tuple[int, int]] = {}
        """Name to its last step, and the number of its media at that step."""
        self._media_warnings: set[str] = set()
        self._sender: Sender | None = None
        self._sink: _Sink
        self.lost = 0
        """Number of records that could be stored neither on disk nor in memory."""
        self.stale = threading.Event()
        """Set when another run has taken over; this one must stop and save nothing."""
        self._target = target
        client = target or (Client(spec.master, spec.token) if spec.master else None)
        if client is not None or spool_only:
            self._sink = _SpoolSink(Spool(run_dir / SPOOL_DIR))
        if client is not None:
            reader = SpoolReader(run_dir / SPOOL_DIR)
            shipment = SpoolUploader(reader, client, spec.run_id)
            self._sender = Sender(shipment, self.stale, longest_pause_s)
            self._sender.start()
        elif not spool_only:
            self._sink = MetricsFile(run_dir / METRICS_FILE, spec)
        Reporter.newest_open = self

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report named numbers.

        A metric whose value is not a number (or a tensor or array of one element) is discarded with
        a warning, once for each name; so is one whose name is empty, longer than 200 characters, or
        has control characters or lone surrogates. The others are reported. NaN and infinities are
        kept.

        Args:
            group: ``training``, ``validation``, ``system``, or any other name.
            steps_completed: Batches (optimizer steps) completed at that time; at least 0.
            metrics: Name to value.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0, or ``metrics``
                is not a mapping.
        """
        if not isinstance(metrics, Mapping):
            problem = f"metrics: must be a mapping of names to numbers, got {metrics!r}"
            raise ConfigError("report", [problem[:200]])
        valid_names = self._valid_names
        if group not in valid_names and not self._check_name(group, "metric group"):
            return
        values: dict[str, float | str] = {}
        if valid_names.issuperset(metrics) and {*map(type, metrics.values())} == {float}:
            values.update(metrics)  # as in most reports
        else:
            for name, value in metrics.items():
                if type(value) is float and name in valid_names:
                    values[name] = value
                else:
                    self._convert(name, value, values)
        steps = steps_completed if type(steps_completed) is int else _step_count(steps_completed)
        if steps < 0:
            _step_count(steps)
        self._put(MetricsRecord(group, steps, values, time.time()))
        if group == "validation":
            self._wake()

    def report_progress(self, value: float) -> None:
        """Report the trial's progress; values are clamped to 0 to 1."""
        value = float(value)
        value = 0.0 if math.isnan(value) else min(1.0, max(0.0, value))
        self._put(ProgressRecord(value, time.time()))

    def report_state(self, state: str) -> None:
        """Report the run's state: starting, training, validating, checkpointing."""
        self._put(StateRecord(state, time.time()))

    def report_alert(self, title: Any, text: Any) -> None:
        """Report a message for the log and for notification channels.

        Args:
            title: Shortened to 200 characters.
            text: Shortened to 4,000 characters.
        """
        self._put(AlertRecord(*alert_text(title, text), time.time()))
        self._wake()

    def report_checkpoint(
        self,
        uuid: str,
        steps_completed: int,
        resources: Mapping[str, int],
        metadata: Mapping[str, Any],
    ) -> None:
        """Report a checkpoint that is complete in the storage.

        Args:
            uuid: Its name in the storage.
            steps_completed: Batches that it holds.
            resources: Path inside the checkpoint to its size in bytes.
            metadata: Values that JSON can represent.

        Raises:
            ConfigError: If ``metadata`` has other values.
        """
        steps, details = _step_count(steps_completed), json_metadata(metadata)
        self._put(CheckpointRecord(uuid, steps, dict(resources), details, time.time()))
        self._wake()

    def report_media(self, name: str, steps_completed: int, items: Sequence[MediaItem]) -> None:
        """Report media of one name and step; they are on disk when this returns.

        Media that are reported again under the same name and step are added to the earlier ones.
        Media that cannot be stored are discarded with a warning: those with an invalid name, those
        beyond the limits of a trial, and all if the disk is full.

        Args:
            name: 1 to 200 characters.
            steps_completed: Batches (optimizer steps) completed; at least 0.
            items: At most 1,000 at one step.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.
        """
        steps = _step_count(steps_completed)
        if problem := media_name_problem(name):
            self.warn_of_media(f"name: {problem}")
            return
        with self._lock:
            last_step, first = self._media_positions.get(name, (-1, 0))
            first = first if last_step == steps else 0
            self._media_positions[name] = steps, first + len(items)
        if first + len(items) > MAX_POSITIONS:
            problem = f"must be at most {MAX_POSITIONS:,} at one step, got more"
            self.warn_of_media(f"media {name!r}: {problem}")
        try:
            for position, item in enumerate(items[: max(0, MAX_POSITIONS - first)], first):
                self._report_medium(name, steps, position, item)
        except OSError as error:
            self.warn_of_media(f"media: cannot be written: {error.strerror or error}")

    def warn_of_media(self, problem: str) -> None:
        """Log why media are discarded, once for each problem."""
        if problem not in self._media_warnings and len(self._media_warnings) < _MAX_NAMES:
            self._media_warnings.add(problem)
            logger.warning("%s; the media are discarded, and training continues", problem)

    def _report_medium(self, name: str, steps: int, position: int, item: MediaItem) -> None:
        size = item.size
        with self._lock:
            count, total = self._media_count + 1, self._media_bytes + size
            fits = count <= MAX_MEDIA and total <= MAX_MEDIA_BYTES
            if fits:
                self._media_count, self._media_bytes = count, total
        if not fits:
            limits = f"{MAX_MEDIA:,} and {size_text(MAX_MEDIA_BYTES)}"
            self.warn_of_media(
                f"media: must be at most {limits} in a trial, got more; report them less often"
            )
            return
        metadata = json_metadata(item.metadata)
        record = MediaRecord(
            name, steps, item.type, "", size, time.time(), position, item.suffix, metadata
        )
        if problem := media_problem(record):
            self.warn_of_media(f"media {name!r}: {problem}")
            return
        digest = self._media_files.write(item)
        self._put(msgspec.structs.replace(record, digest=digest))
        if self._sender is not None and self._media_uploader is None:
            store = self._target or MediaStore.of_run(self.spec)
            directory = Path(self.spec.run_dir, MEDIA_DIR)
            self._media_uploader = MediaUploader(directory, store, self.stale)
            self._media_uploader.start()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Upload all reports so far; return whether all of them arrived in time."""
        with self._lock:
            self._flush_buffer()
            done = not self._buffered
        return done and (self._sender is None or self._sender.flush(timeout_s))

    def close(self, timeout_s: float = 30.0) -> bool:
        """Upload the remaining reports for at most ``timeout_s``.

        The agent uploads the rest later.

        Returns:
            Whether everything has arrived (without a server: is in the file).
        """
        if Reporter.newest_open is self:
            Reporter.newest_open = None
        with self._lock:
            self._flush_buffer()
            done = not self._buffered
        ends_at = time.monotonic() + timeout_s
        if self._sender is not None:
            done = self._sender.finish(timeout_s) and done
        if self._media_uploader is not None:
            done = self._media_uploader.finish(max(0.0, ends_at - time.monotonic())) and done
        with self._lock:
            self._sink.close()
            self._sink = _ClosedSink()
        return done

    def _check_name(self, name: str, what: str) -> bool:
        """Return whether a name can be stored; warn once if not."""
        problem = metric_name_problem(name)
        if problem is None:
            if len(self._valid_names) >= _MAX_NAMES:
                self._valid_names.clear()
            self._valid_names.add(name)
        elif name not in self._invalid_names:
            self._invalid_names.add(name)
            logger.warning("%s name: %s; it is discarded, the others are stored", what, problem)
        return problem is None

    def _convert(self, key: Any, value: Any, values: dict[str, float | str]) -> None:
        """Add a value that converts to a number; text is rejected even if it looks like one."""
        name = str(key)
        if name not in self._valid_names and not self._check_name(name, "metric"):
            return
        raised = ""
        if not isinstance(value, (str, bytes)):
            try:
                values[name] = float(value.item() if hasattr(value, "item") else value)
            except Exception as error:  # noqa: BLE001 - a metric must not stop the training
                raised = f", whose float() raises {one_line(error)}"
            else:
                return
        if name not in self._invalid_names:
            self._invalid_names.add(name)
            got = type(value).__name__ + raised
            logger.warning("metric %r is discarded: must be a number, got %s", name, got)

    def _wake(self) -> None:
        if self._sender is not None:
            self._sender.wake()

    def _put(self, record: Record) -> None:
        payload = self._sink.encode(record)
        with self._lock:
            if self._buffered:
                self._buffer(payload)
                self._flush_buffer()
                return
            try:
                self._sink.append(payload)
            except OSError as error:
                logger.warning(
                    "cannot write reports, keeping them in memory while training continues: "
                    "%s; make room on the disk that holds the run's directory",
                    error,
                )
                self._buffer(payload)

    def _buffer(self, payload: bytes) -> None:
        if len(self._buffered) >= _MAX_BUFFERED:
            self._buffered.popleft()
            self.lost += 1
            if self.lost == 1:
                logger.error("the disk is still full: the oldest reports are being lost")
        self._buffered.append(payload)

    def _flush_buffer(self) -> None:
        """Write the buffered records, oldest first, until the disk is full."""
        while self._buffered:
            try:
                self._sink.append(self._buffered[0])
            except OSError:
                return
            self._buffered.popleft()
            if not self._buffered:
                logger.warning("reports can be written again; %d were lost", self.lost)


class _SpoolSink:
    def __init__(self, spool: Spool) -> None:
        self.append = spool.append
        self.close = spool.close
        self.encode = msgspec.msgpack.Encoder().encode


class _ClosedSink:
    """Null sink after closing, so that a late report from another thread is harmless."""

    def encode(self, _record: Record) -> bytes:
        return b""

    def append(self, _payload: bytes) -> None:
        logger.debug("a report after close() is ignored")

    def close(self) -> None:
        pass


def _step_count(steps_completed: Any) -> int:
    try:
        steps = operator.index(steps_completed)
    except TypeError:
        steps = -1
    if steps < 0:
        problem = f"must be a whole number of at least 0, got {steps_completed!r}"
        raise ConfigError("report", [f"steps_completed: {problem}"])
    return steps


def json_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that JSON can represent; numbers that are not finite become strings.

    Raises:
        ConfigError: If a value has no form in JSON.
    """
    try:
        plain: dict[str, Any] = _to_json(dict(metadata))
        msgspec.json.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = f"metadata: must hold only what JSON can hold: {error}"
        raise ConfigError("checkpoint", [problem]) from error
    return plain


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_to_json(inner) for inner in value]
    if isinstance(value, float):
        return wire_number(float(value))  # numpy's float64 is a float, but not for JSON
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Path):
        return str(value)
    return _to_json(value.item()) if hasattr(value, "item") else msgspec.to_builtins(value)
