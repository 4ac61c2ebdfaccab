"""Progress of long transfers, logged at intervals."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from zerolab.formatting import size_text

__all__ = ["TransferProgress"]

logger = logging.getLogger(__name__)

_EVERY_S = 10.0


class TransferProgress:
    """Counter of a transfer's bytes that logs progress; short transfers log nothing.

    Args:
        what: Description of the transfer, e.g. ``checkpoint 1234: uploading``.
        total: Number of bytes to transfer.
        tell: Receives the lines; the module's logger by default.
        every_s: Seconds between two lines.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        description: str,
        total: int,
        *,
        report: Callable[[str], None] = logger.info,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._description = description
        self._total = total
        self._report = report
        self._every_s = every_s
        self._clock = clock
        self._started = self._last_report = clock()
        self._done = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def file(self) -> Iterator[Callable[[int], None]]:
        """Yield a callback that counts the bytes of one file; a failed block takes them back."""
        counted = 0

        def report(count: int) -> None:
            nonlocal counted
            counted += count
            self._add(count)

        try:
            yield report
        except BaseException:
            self._add(-counted)
            raise

    def end(self) -> None:
        """Log the duration if any progress was logged before."""
        if self._last_report > self._started:
            took = self._clock() - self._started
            self._report(f"{self._description}: {size_text(self._total)} in {took:.0f} s")

    def _add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = self._clock()
            if now - self._last_report < self._every_s:
                return
            self._last_report = now
            done = self._done
        share = 100 * done / self._total if self._total else 100.0
        self._report(
            f"{self._description}: {size_text(done)} of {size_text(self._total)} ({share:.0f} %)"
        )
