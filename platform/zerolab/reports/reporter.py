"""What a run says about itself: written to disk at once, shipped to the server behind its back.

With a server the records go to a spool (:mod:`zerolab.reports.spool`) and from there over HTTP;
without one to ``metrics.jsonl`` in the run's directory, which ``zerolab import`` brings into a
server later. Either way a report costs microseconds and survives the death of the process.
"""

import logging
import math
import operator
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from zerolab.client.http import Client
from zerolab.contract.names import metric_name_problem
from zerolab.contract.spec import RunSpec
from zerolab.contract.wire import (
    CheckpointRecord,
    MetricsRecord,
    ProgressRecord,
    Record,
    StateRecord,
    wire_number,
)
from zerolab.errors import ConfigError, one_line
from zerolab.reports.metrics_file import MetricsFile
from zerolab.reports.sender import Sender, Shipment
from zerolab.reports.spool import Spool, SpoolReader

__all__ = ["METRICS_FILE", "SPOOL_DIR", "Reporter", "plain_metadata"]

logger = logging.getLogger(__name__)

SPOOL_DIR = "spool"
METRICS_FILE = "metrics.jsonl"
_MOST_NAMES = 10_000  # checked names kept in memory
_MOST_HELD = 10_000  # records kept in memory while the disk is full


class _Sink(Protocol):
    def encode(self, record: Record) -> bytes: ...
    def append(self, payload: bytes) -> None: ...
    def close(self) -> None: ...


class Reporter:
    """The reports of one run; made by its chief only, and used from any of its threads.

    No method waits for the server or fails because of it, nor because the disk is full: then
    the newest 10,000 records are kept in memory until there is room, and a warning says so.

    Args:
        spec: The run. Without ``spec.master`` the reports stay in a local file.
        longest_pause_s: Longest wait before a server that is away is tried again, in seconds.
    """

    def __init__(self, spec: RunSpec, *, longest_pause_s: float = 10.0) -> None:
        run_dir = Path(spec.run_dir)
        self._lock = threading.Lock()
        self._held: deque[bytes] = deque()
        self._unusable: set[str] = set()
        self._correct: set[str] = set()
        """Names of metrics and groups that have been checked."""
        self._sender: Sender | None = None
        self._sink: _Sink
        self.lost = 0
        """Records that could be kept neither on disk nor in memory."""
        self.stale = threading.Event()
        """Set when another run has taken over; this one must stop and save nothing."""
        if spec.master:
            self._sink = _SpoolSink(Spool(run_dir / SPOOL_DIR))
            reader = SpoolReader(run_dir / SPOOL_DIR)
            shipment = Shipment(reader, Client(spec.master, spec.token), spec.run_id)
            self._sender = Sender(shipment, self.stale, longest_pause_s)
            self._sender.start()
        else:
            self._sink = MetricsFile(run_dir / METRICS_FILE, spec)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report named numbers.

        A metric whose value is not a number (or a tensor or array of one element) is discarded
        with a warning, once for each name; so is one whose name is empty, longer than 200
        characters, or has control characters or lone surrogates. The others are reported. NaN and
        infinities are kept.

        Args:
            group: ``training``, ``validation``, ``system``, or any other name.
            steps_completed: Batches (optimizer steps) completed when they were taken; at least 0.
            metrics: Name to value.

        Raises:
            ConfigError: If ``steps_completed`` is not a whole number of at least 0.
        """
        if group not in self._correct and not self._is_correct(group, "metric group"):
            return
        values: dict[str, float | str] = {}
        for name, value in metrics.items():
            if type(value) is float and name in self._correct:
                values[name] = value
            else:
                self._convert(name, value, values)
        steps = steps_completed if type(steps_completed) is int else _whole(steps_completed)
        if steps < 0:
            _whole(steps)
        self._put(MetricsRecord(group, steps, values, time.time()))
        if group == "validation":
            self._wake()

    def report_progress(self, value: float) -> None:
        """Report how far the trial is, 0 to 1; what lies outside is brought inside."""
        value = float(value)
        value = 0.0 if math.isnan(value) else min(1.0, max(0.0, value))
        self._put(ProgressRecord(value, time.time()))

    def report_state(self, state: str) -> None:
        """Report what the run is doing: starting, training, validating, checkpointing."""
        self._put(StateRecord(state, time.time()))

    def report_checkpoint(
        self,
        uuid: str,
        steps_completed: int,
        resources: Mapping[str, int],
        metadata: Mapping[str, Any],
    ) -> None:
        """Report a checkpoint that is complete in the storage.

        Args:
            uuid: Its name there.
            steps_completed: Batches that it holds.
            resources: Path inside the checkpoint to its size in bytes.
            metadata: Anything that JSON can hold.

        Raises:
            ConfigError: If ``metadata`` holds what JSON cannot.
        """
        steps, details = _whole(steps_completed), plain_metadata(metadata)
        self._put(CheckpointRecord(uuid, steps, dict(resources), details, time.time()))
        self._wake()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Ship what has been reported so far; return whether all of it arrived in time."""
        with self._lock:
            self._write_held()
            done = not self._held
        return done and (self._sender is None or self._sender.flush(timeout_s))

    def close(self, timeout_s: float = 30.0) -> bool:
        """Ship what is left, for at most ``timeout_s``; the agent ships what remains after that.

        Returns:
            Whether everything has arrived (without a server: is in the file).
        """
        with self._lock:
            self._write_held()
            done = not self._held
        if self._sender is not None:
            done = self._sender.finish(timeout_s) and done
        with self._lock:
            self._sink.close()
            self._sink = _Closed()
        return done

    def _is_correct(self, name: str, what: str) -> bool:
        """Whether a name can be stored; a warning says once why not."""
        problem = metric_name_problem(name)
        if problem is None:
            if len(self._correct) >= _MOST_NAMES:
                self._correct.clear()
            self._correct.add(name)
        elif name not in self._unusable:
            self._unusable.add(name)
            logger.warning("%s name: %s; it is discarded, the others are stored", what, problem)
        return problem is None

    def _convert(self, key: Any, value: Any, values: dict[str, float | str]) -> None:
        """Keep whatever turns into a number by itself, but no text that merely looks like one."""
        name = str(key)
        if name not in self._correct and not self._is_correct(name, "metric"):
            return
        raised = ""
        if not isinstance(value, (str, bytes)):
            try:
                values[name] = float(value.item() if hasattr(value, "item") else value)
            except Exception as error:  # noqa: BLE001 - a metric must not end the training
                raised = f", whose float() raises {one_line(error)}"
            else:
                return
        if name not in self._unusable:
            self._unusable.add(name)
            got = type(value).__name__ + raised
            logger.warning("metric %r is left out: must be a number, got %s", name, got)

    def _wake(self) -> None:
        if self._sender is not None:
            self._sender.wake()

    def _put(self, record: Record) -> None:
        payload = self._sink.encode(record)
        with self._lock:
            if self._held:
                self._hold(payload)
                self._write_held()
                return
            try:
                self._sink.append(payload)
            except OSError as error:
                logger.warning(
                    "reports are kept in memory until they can be written, and training goes on: "
                    "%s; make room on the disk that holds the run's directory",
                    error,
                )
                self._hold(payload)

    def _hold(self, payload: bytes) -> None:
        if len(self._held) >= _MOST_HELD:
            self._held.popleft()
            self.lost += 1
            if self.lost == 1:
                logger.error("the disk is still full: the oldest reports are being lost")
        self._held.append(payload)

    def _write_held(self) -> None:
        """Write what waits in memory, oldest first, as far as there is room now."""
        while self._held:
            try:
                self._sink.append(self._held[0])
            except OSError:
                return
            self._held.popleft()
            if not self._held:
                logger.warning("reports can be written again; %d were lost", self.lost)


class _SpoolSink:
    def __init__(self, spool: Spool) -> None:
        self.append = spool.append
        self.close = spool.close
        self.encode = msgspec.msgpack.Encoder().encode


class _Closed:
    """Takes the place of a closed sink, so that a late report from another thread is harmless."""

    def encode(self, _record: Record) -> bytes:
        return b""

    def append(self, _payload: bytes) -> None:
        logger.debug("a report after close() is left out")

    def close(self) -> None:
        pass


def _whole(steps_completed: Any) -> int:
    try:
        steps = operator.index(steps_completed)
    except TypeError:
        steps = -1
    if steps < 0:
        problem = f"must be a whole number of at least 0, got {steps_completed!r}"
        raise ConfigError("report", [f"steps_completed: {problem}"])
    return steps


def plain_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that JSON can hold; numbers that are not finite become strings.

    Raises:
        ConfigError: If something in it has no form in JSON.
    """
    try:
        plain: dict[str, Any] = _plain(dict(metadata))
        msgspec.json.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = f"metadata: must hold only what JSON can hold: {error}"
        raise ConfigError("checkpoint", [problem]) from error
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return wire_number(float(value))  # numpy's own float is one too, and JSON has none
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Path):
        return str(value)
    return _plain(value.item()) if hasattr(value, "item") else msgspec.to_builtins(value)
