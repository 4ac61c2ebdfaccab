"""Upload of a spool's records to the server: in order, exactly once, retried without limit."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from zerolab.client.transport import Backoff
from zerolab.contract.messages import MetricsRecord
from zerolab.errors import (
    ConfigError,
    ForbiddenError,
    NotFoundError,
    StaleRunError,
    UnreachableError,
)
from zerolab.reports.spool import SPOOL_DIR, SpoolReader

__all__ = ["ReportTarget", "Sender", "SpoolUploader", "deliver"]

logger = logging.getLogger(__name__)
BATCH_BYTES = 512 * 1024
_MAX_RECORDS = 10_000
INTERVAL_S = 0.2
_FIRST_PAUSE_S = 0.2
_ENCODER = msgspec.msgpack.Encoder()


class ReportTarget(Protocol):
    """Receiver of reports, such as :class:`zerolab.client.http.Client`."""

    def report(self, run_id: int, body: bytes) -> int:
        """Store the new records; return the number of the last stored one."""

    def close(self) -> None:
        """Close the connection."""


class _EncodedBatch(msgspec.Struct, frozen=True):
    """A :class:`zerolab.contract.messages.ReportBatch` with the encoded records of the spool."""

    first: int
    records: list[msgspec.Raw]


class SpoolUploader:
    """Remaining upload of one run's spool.

    The server answers each batch with the number of the last record that it has stored, and drops
    records that it has stored already. A batch whose response was lost is therefore sent again.
    After a restart of either side, the response to the first batch shows where to continue.
    """

    def __init__(self, reader: SpoolReader, client: ReportTarget, run_id: int) -> None:
        self._reader = reader
        self._client = client
        self._run_id = run_id
        self._first = 1
        self._payloads: list[bytes] = []  # read and not yet acknowledged, from record _first on
        self._batch_limit = _MAX_RECORDS
        self._blanked = 0  # number of the last rejected record
        self._lost_through = 0  # number of the last lost record
        self.stored = 0
        """Number of the last record that the server has acknowledged."""
        self.lost = 0
        """Number of records that the spool could not read."""

    def send_batch(self) -> bool:
        """Send one batch; return whether there was any.

        Raises:
            StaleRunError: If the server rejects the run: it has ended or was superseded.
            UnreachableError: If the server is unreachable; call again later.
        """
        if not self._payloads:
            self._fetch()
        batch = self._payloads[: self._batch_limit]
        if not batch:
            return False
        body = _ENCODER.encode(_EncodedBatch(self._first, [msgspec.Raw(data) for data in batch]))
        try:
            stored = self._client.report(self._run_id, body)
        except ConfigError as error:
            self._isolate_rejected(len(batch), error)
            return True
        self._batch_limit = min(_MAX_RECORDS, 2 * self._batch_limit)
        self._acknowledge(stored, len(batch))
        return True

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _fetch(self) -> None:
        """Read the next records; an empty record replaces each lost one."""
        self._first, payloads = self._reader.read(BATCH_BYTES)
        lost = [number for number, data in enumerate(payloads, self._first) if not data]
        self._payloads = [data or _empty_record() for data in payloads]
        fresh = [number for number in lost if number > self._lost_through]
        if fresh:
            self._lost_through = fresh[-1]
            self.lost += len(fresh)
            logger.error(
                "%d reports of run %d are lost (records %d to %d): their file %s is damaged",
                len(fresh), self._run_id, fresh[0], fresh[-1], self._reader.directory,
            )  # fmt: skip

    def _acknowledge(self, stored: int, sent: int) -> None:
        first, self.stored = self._first, stored
        if first <= stored + 1 <= first + len(self._payloads):
            self._payloads = self._payloads[stored + 1 - first :]
            self._first = stored + 1
        else:
            # The server has stored more after a restart of this process, which begins with the
            # oldest segment, and fewer if its database was restored from a backup.
            self._payloads = []
            self._reader.seek(stored + 1)
        self._reader.discard(stored)
        if stored < first:  # no progress: the caller must wait before it tries again
            last = first + sent - 1
            msg = f"the server has stored {stored} records, but none of {first} to {last}"
            raise UnreachableError(msg)

    def _isolate_rejected(self, count: int, error: ConfigError) -> None:
        """Halve the batch until it is the rejected record, then replace that with an empty one."""
        if count > 1:
            self._batch_limit = count // 2
            return
        if self._blanked == self._first:
            raise error
        self._blanked = self._first
        logger.error("record %d of run %d is discarded: %s", self._first, self._run_id, error)
        self._payloads[0] = _empty_record()


def _empty_record() -> bytes:
    """Encode a record without content, which replaces one that the server rejects."""
    return _ENCODER.encode(MetricsRecord("system", 0, {}, time.time()))


class Sender(threading.Thread):
    """Thread that uploads reports during training.

    It never raises into the training. While the server is unreachable it retries with growing
    delays, and logs that once.

    Args:
        uploader: Uploader of the spool.
        stale: Set when another run has taken over; nothing more is sent.
        longest_pause_s: Maximum delay between two attempts.
    """

    def __init__(
        self, uploader: SpoolUploader, stale: threading.Event, longest_pause_s: float
    ) -> None:
        super().__init__(name="zerolab-sender", daemon=True)
        self._uploader = uploader
        self._backoff = Backoff(_FIRST_PAUSE_S, longest_pause_s)
        self._wake = threading.Event()
        self._closing = False
        self._flush_requested: threading.Event | None = None
        self._outage_since: float | None = None
        self._stale = stale

    def wake(self) -> None:
        """Upload now instead of at the next interval, unless the server is unreachable."""
        if self._outage_since is None:
            self._wake.set()

    def flush(self, timeout_s: float) -> bool:
        """Upload the current records; return whether all of them arrived within ``timeout_s``."""
        flush_done = self._flush_requested = threading.Event()
        self.wake()
        return self.is_alive() and flush_done.wait(timeout_s) and not self._stale.is_set()

    def finish(self, timeout_s: float) -> bool:
        """Upload the remaining records and end the thread.

        Returns:
            Whether everything arrived within ``timeout_s``.
        """
        self._closing = True
        self._wake.set()
        self.join(timeout_s)
        return not self.is_alive() and not self._stale.is_set()

    def run(self) -> None:
        """Upload until nothing is left after :meth:`finish`, or the run is stale."""
        try:
            self._upload_loop()
        finally:  # the thread may end long after finish() timed out
            if self._flush_requested is not None:
                self._flush_requested.set()
            self._uploader.close()

    def _upload_loop(self) -> None:
        pause_s = 0.0
        while True:
            self._wake.wait(pause_s or INTERVAL_S)
            self._wake.clear()
            # Read before the spool, so that all records of the flush are sent.
            closing, flush_requested = self._closing, self._flush_requested
            try:
                while self._uploader.send_batch():
                    pass
            except (StaleRunError, NotFoundError) as error:
                logger.warning("the server rejects the reports of this run: %s", error)
                self._stale.set()
                return
            except Exception as error:  # noqa: BLE001 - training must continue, whatever fails here
                pause_s = self._backoff.pause_s()
                self._log_outage(error)
                continue
            pause_s = 0.0
            self._backoff.reset()
            self._log_recovery()
            if flush_requested is not None:
                flush_requested.set()
            if closing:
                return

    def _log_outage(self, error: Exception) -> None:
        if self._outage_since is not None:
            return
        self._outage_since = time.monotonic()
        expected = isinstance(error, (UnreachableError, ForbiddenError))
        logger.warning(
            "cannot upload reports, retrying while training continues: %s",
            error,
            exc_info=None if expected else error,
        )

    def _log_recovery(self) -> None:
        if self._outage_since is not None:
            logger.info(
                "reports are uploaded again after %.0f s", time.monotonic() - self._outage_since
            )
            self._outage_since = None


def deliver(
    run_dir: Path, client: ReportTarget, run_id: int, log: Callable[[str], None] | None = None
) -> int:
    """Upload the remaining reports of a run whose processes have ended.

    Safe to repeat: the server drops records that it has stored already.

    Args:
        run_dir: The run's scratch directory.
        client: ReportTarget of the server.
        run_id: The run.
        log: Called with a message for the trial's log if reports were lost, once the rest has
            arrived.

    Returns:
        Number of the last record that the server has stored; 0 when the spool is empty.

    Raises:
        StaleRunError: If the server rejects the run: it has ended or was superseded.
        UnreachableError: If the server is unreachable; call again later.
    """
    uploader = SpoolUploader(SpoolReader(run_dir / SPOOL_DIR, ended=True), client, run_id)
    while uploader.send_batch():
        pass
    if uploader.lost and log is not None:
        log(f"reports of this run that were lost because their file was damaged: {uploader.lost}")
    return uploader.stored
