"""How far a long transfer is, said in the log now and then."""

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
    """Counts the bytes of one transfer; a short one says nothing.

    Args:
        what: What is going on, e.g. ``checkpoint 1234: uploading``.
        total: Bytes in all.
        tell: Takes the lines; the log when left out.
        every_s: Seconds between two lines.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        tell: Callable[[str], None] = logger.info,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._tell = tell
        self._every_s = every_s
        self._clock = clock
        self._started = self._said = clock()
        self._done = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def file(self) -> Iterator[Callable[[int], None]]:
        """Give what counts the bytes of one file; they are taken back when the block fails."""
        counted = 0

        def told(count: int) -> None:
            nonlocal counted
            counted += count
            self._add(count)

        try:
            yield told
        except BaseException:
            self._add(-counted)
            raise

    def end(self) -> None:
        """Say how long it took, if it was long enough to have been spoken of."""
        if self._said > self._started:
            took = self._clock() - self._started
            self._tell(f"{self._what}: {size_text(self._total)} in {took:.0f} s")

    def _add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = self._clock()
            if now - self._said < self._every_s:
                return
            self._said = now
            done = self._done
        share = 100 * done / self._total if self._total else 100.0
        self._tell(f"{self._what}: {size_text(done)} of {size_text(self._total)} ({share:.0f} %)")
