"""SIGTERM handling of a launcher until its ranks have started."""

import signal
from types import FrameType

__all__ = ["DeferredSigterm", "StoppedEarlyError"]


class StoppedEarlyError(BaseException):
    """The launcher got SIGTERM before it started a rank.

    Not a subclass of Exception, so that ``except Exception`` does not swallow it.
    """


class DeferredSigterm:
    """SIGTERM handler that defers the signal while a launcher imports modules.

    An exception raised within an import leaves the module half imported, or is swallowed there.
    """

    def __init__(self) -> None:
        self._deferring = True
        self._received = False
        signal.signal(signal.SIGTERM, self._handle)

    def release(self) -> None:
        """Stop deferring: from now on the handler raises.

        Raises:
            StoppedEarlyError: If the signal has arrived already, or when it arrives.
        """
        self._deferring = False
        if self._received:
            raise StoppedEarlyError

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._received = True
        if not self._deferring:
            raise StoppedEarlyError
