"""Ships a spool's records to the server: in order, each exactly once, for as long as it takes."""

import logging
import threading
import time

import msgspec

from zerolab.client.backoff import Backoff
from zerolab.client.http import Client
from zerolab.contract.wire import MetricsRecord
from zerolab.errors import (
    ConfigError,
    ForbiddenError,
    NotFoundError,
    StaleRunError,
    UnreachableError,
)
from zerolab.reports.spool import SpoolReader

__all__ = ["Sender", "Shipment"]

logger = logging.getLogger(__name__)

BATCH_BYTES = 512 * 1024
_MOST_RECORDS = 10_000
INTERVAL_S = 0.2
_FIRST_PAUSE_S = 0.2
_ENCODER = msgspec.msgpack.Encoder()


class _EncodedBatch(msgspec.Struct, frozen=True):
    """A :class:`zerolab.contract.wire.ReportBatch` whose records stay as the spool holds them."""

    first: int
    records: list[msgspec.Raw]


class Shipment:
    """What is left to be sent of one run's spool.

    The server answers each batch with the number of the last record that it has stored, and
    drops what it has stored already. So a batch whose answer was lost is simply sent again, and
    after any death of either side the answer to the first batch says where to go on.
    """

    def __init__(self, reader: SpoolReader, client: Client, run_id: int) -> None:
        self._reader = reader
        self._client = client
        self._run_id = run_id
        self._first = 1
        self._payloads: list[bytes] = []  # read and not yet acknowledged, from record _first on
        self._most = _MOST_RECORDS
        self._blank = 0  # number of the record that was refused last
        self._lost_through = 0  # number of the last record that is lost
        self.stored = 0
        """Number of the last record that the server has acknowledged."""
        self.lost = 0
        """Records that the spool could not give back."""

    def send_some(self) -> bool:
        """Send one batch; return whether there was any.

        Raises:
            StaleRunError: If nothing of this run is wanted any more.
            UnreachableError: If the server cannot take it now; call again later.
        """
        if not self._payloads:
            self._fetch()
        batch = self._payloads[: self._most]
        if not batch:
            return False
        body = _ENCODER.encode(_EncodedBatch(self._first, [msgspec.Raw(data) for data in batch]))
        try:
            stored = self._client.report(self._run_id, body)
        except ConfigError as error:
            self._refused(len(batch), error)
            return True
        self._most = min(_MOST_RECORDS, 2 * self._most)
        self._acknowledged(stored, len(batch))
        return True

    def close(self) -> None:
        """Close the connection; nothing more is sent."""
        self._client.close()

    def _fetch(self) -> None:
        """Read what comes next; an empty record takes the place of each that is lost."""
        self._first, payloads = self._reader.read(BATCH_BYTES)
        lost = [number for number, data in enumerate(payloads, self._first) if not data]
        self._payloads = [data or _nothing() for data in payloads]
        fresh = [number for number in lost if number > self._lost_through]
        if fresh:
            self._lost_through = fresh[-1]
            self.lost += len(fresh)
            logger.error(
                "%d reports of run %d are lost (records %d to %d): their file %s is damaged",
                len(fresh), self._run_id, fresh[0], fresh[-1], self._reader.directory,
            )  # fmt: skip

    def _acknowledged(self, stored: int, sent: int) -> None:
        first, self.stored = self._first, stored
        if first <= stored + 1 <= first + len(self._payloads):
            self._payloads = self._payloads[stored + 1 - first :]
            self._first = stored + 1
        else:
            self._payloads = []
            self._reader.seek(stored + 1)
        self._reader.discard(stored)
        if stored < first:
            last = first + sent - 1
            msg = f"the server has stored {stored} records, and nothing of {first} to {last}"
            raise UnreachableError(msg)

    def _refused(self, count: int, error: ConfigError) -> None:
        """Find the one record that the server will never take, so that the others get there."""
        if count > 1:
            self._most = count // 2
            return
        if self._blank == self._first:
            raise error
        self._blank = self._first
        logger.error("record %d of run %d is left out: %s", self._first, self._run_id, error)
        self._payloads[0] = _nothing()


def _nothing() -> bytes:
    """Encode a record that says nothing, to stand where the server takes no other."""
    return _ENCODER.encode(MetricsRecord("system", 0, {}, time.time()))


class Sender(threading.Thread):
    """The thread that ships while the training goes on.

    It never raises into the training: while the server is away it tries again, with growing
    pauses, and says so once.

    Args:
        shipment: What to send.
        stale: Set when another run has taken over, and nothing more is sent.
        longest_pause_s: Between two attempts.
    """

    def __init__(self, shipment: Shipment, stale: threading.Event, longest_pause_s: float) -> None:
        super().__init__(name="zerolab-sender", daemon=True)
        self._shipment = shipment
        self._backoff = Backoff(_FIRST_PAUSE_S, longest_pause_s)
        self._wake = threading.Event()
        self._closing = False
        self._asked: threading.Event | None = None
        self._away_since: float | None = None
        self._stale = stale

    def wake(self) -> None:
        """Send what is there now, rather than at the next interval, unless the server is away."""
        if self._away_since is None:
            self._wake.set()

    def flush(self, timeout_s: float) -> bool:
        """Send what is there now; return whether all of it arrived within ``timeout_s``."""
        asked = self._asked = threading.Event()
        self.wake()
        return self.is_alive() and asked.wait(timeout_s) and not self._stale.is_set()

    def finish(self, timeout_s: float) -> bool:
        """Send what is left and end the thread.

        Returns:
            Whether everything arrived within ``timeout_s``.
        """
        self._closing = True
        self._wake.set()
        self.join(timeout_s)
        return not self.is_alive() and not self._stale.is_set()

    def run(self) -> None:
        """Ship until there is nothing left after :meth:`finish`, or the run is stale."""
        try:
            self._ship()
        finally:  # here, as it may end long after finish() has given up on it
            if self._asked is not None:
                self._asked.set()
            self._shipment.close()

    def _ship(self) -> None:
        pause_s = 0.0
        while True:
            self._wake.wait(pause_s or INTERVAL_S)
            self._wake.clear()
            # Read before the spool: what was reported before is sent.
            closing, asked = self._closing, self._asked
            try:
                while self._shipment.send_some():
                    pass
            except (StaleRunError, NotFoundError) as error:
                logger.warning("reports of this run are not wanted any more: %s", error)
                self._stale.set()
                return
            except Exception as error:  # noqa: BLE001 - training must go on, whatever happens here
                pause_s = self._backoff.pause_s()
                self._note_absence(error)
                continue
            pause_s = 0.0
            self._backoff.reset()
            self._note_return()
            if asked is not None:
                asked.set()
            if closing:
                return

    def _note_absence(self, error: Exception) -> None:
        if self._away_since is not None:
            return
        self._away_since = time.monotonic()
        expected = isinstance(error, (UnreachableError, ForbiddenError))
        logger.warning(
            "reports wait on disk, and training goes on: %s",
            error,
            exc_info=None if expected else error,
        )

    def _note_return(self) -> None:
        if self._away_since is not None:
            logger.info("reports flow again after %.0f s", time.monotonic() - self._away_since)
            self._away_since = None
