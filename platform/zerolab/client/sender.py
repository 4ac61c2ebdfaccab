"""Ships a spool's records to the server: in order, each exactly once, for as long as it takes."""

import logging
import random
import threading
import time

import msgspec

from zerolab.client.http import Client
from zerolab.client.spool import SpoolReader
from zerolab.errors import (
    ConfigError,
    ForbiddenError,
    NotFoundError,
    StaleRunError,
    UnreachableError,
    ZerolabError,
)

__all__ = ["Sender", "Shipment"]

logger = logging.getLogger(__name__)

BATCH_BYTES = 512 * 1024
INTERVAL_S = 0.2
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_ENCODER = msgspec.msgpack.Encoder()


class _EncodedBatch(msgspec.Struct, frozen=True):
    """A :class:`zerolab.wire.ReportBatch` whose records stay as the spool holds them."""

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
        self._batch_bytes = BATCH_BYTES
        self.stored = 0
        """Number of the last record that the server has acknowledged."""

    def send_some(self) -> bool:
        """Send one batch; return whether there was any.

        Raises:
            StaleRunError: If nothing of this run is wanted any more.
            UnreachableError: If the server cannot take it now; call again later.
        """
        first, payloads = self._reader.read(self._batch_bytes)
        if not payloads:
            return False
        body = _ENCODER.encode(_EncodedBatch(first, [msgspec.Raw(data) for data in payloads]))
        try:
            self.stored = self._client.report(self._run_id, body)
        except ConfigError as error:
            self._refused(first, len(payloads), error)
            return True
        except ZerolabError:
            self._reader.seek(first)
            raise
        self._reader.seek(self.stored + 1)
        self._batch_bytes = BATCH_BYTES
        self._reader.discard(self.stored)
        if self.stored < first:
            msg = f"the server stored nothing of records {first} to {first + len(payloads) - 1}"
            raise UnreachableError(msg)
        return True

    def _refused(self, first: int, count: int, error: ConfigError) -> None:
        """Find the one record that the server will never take, so that the others get there."""
        if count > 1:
            self._batch_bytes = 1  # one record at a time, until one is taken
            self._reader.seek(first)
            return
        logger.error("record %d of run %d is left out: %s", first, self._run_id, error)


class Sender(threading.Thread):
    """The thread that ships while the training goes on.

    It never raises into the training: while the server is away it tries again, with growing
    pauses of at most 10 s, and says so once.

    Args:
        shipment: What to send.
        stale: Set when another run has taken over, and nothing more is sent.
    """

    def __init__(self, shipment: Shipment, stale: threading.Event) -> None:
        super().__init__(name="zerolab-sender", daemon=True)
        self._shipment = shipment
        self._wake = threading.Event()
        self._closing = False
        self._away_since: float | None = None
        self._stale = stale

    def wake(self) -> None:
        """Send what is there now, rather than at the next interval, unless the server is away."""
        if self._away_since is None:
            self._wake.set()

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
        pause_s = 0.0
        while True:
            self._wake.wait(pause_s or INTERVAL_S)
            self._wake.clear()
            closing = self._closing  # read before the spool: what was reported before is sent
            try:
                while self._shipment.send_some():
                    pass
            except (StaleRunError, NotFoundError) as error:
                logger.warning("reports of this run are not wanted any more: %s", error)
                self._stale.set()
                return
            except Exception as error:  # noqa: BLE001 - training must go on, whatever happens here
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s or _FIRST_PAUSE_S)
                pause_s *= random.uniform(0.8, 1.2)  # noqa: S311 - spreads load, not a secret
                self._note_absence(error)
                continue
            pause_s = 0.0
            self._note_return()
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
