"""SIGTERM that comes to a launcher before there are ranks to pass it on to."""

import signal
from types import FrameType

__all__ = ["EarlySignal", "StoppedEarlyError"]


class StoppedEarlyError(BaseException):
    """The launcher was told to stop, and has started no rank; not for ``except Exception``."""


class EarlySignal:
    """Holds SIGTERM from the first line of a launcher on, while it imports what ranks need.

    Not from within an import: a module that is left half imported, or swallows what is raised, is
    no place to leave from.
    """

    def __init__(self) -> None:
        self._held = True
        self._asked = False
        signal.signal(signal.SIGTERM, self._note)

    def heed(self) -> None:
        """Hold it no longer: until ranks are started, it ends what the launcher does.

        Raises:
            StoppedEarlyError: If it has come, or whenever it comes.
        """
        self._held = False
        if self._asked:
            raise StoppedEarlyError

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True
        if not self._held:
            raise StoppedEarlyError
