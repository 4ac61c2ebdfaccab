"""Removes directories without anyone waiting for it."""

import logging
import queue
import shutil
import threading

__all__ = ["Janitor"]

logger = logging.getLogger(__name__)


class Janitor:
    """Removes checkpoint directories on a thread of its own."""

    def __init__(self) -> None:
        self._paths: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="janitor", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def remove(self, path: str) -> None:
        """Have a directory removed soon."""
        self._paths.put(path)

    def close(self) -> None:
        """Remove what is waiting, then end."""
        if self._thread.is_alive():
            self._paths.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (path := self._paths.get()) is not None:
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("checkpoint %s could not be removed: %s", path, error)
