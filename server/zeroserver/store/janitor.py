"""Removes directories without anyone waiting for it, and none is forgotten before it is gone.

A directory is marked in the transaction that lets go of it, removed after the commit, and its mark
last of all. So whatever dies in between, the next start finds what is left.
"""

import logging
import queue
import shutil
import threading
from functools import partial

from sqlalchemy import Connection, delete, select

from zeroserver.errors import StorageError
from zeroserver.store.database import Database, Transaction
from zeroserver.store.schema import discarded

__all__ = ["Janitor"]

logger = logging.getLogger(__name__)


class Janitor:
    """Removes checkpoint directories on a thread of its own."""

    def __init__(self) -> None:
        self._paths: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._database: Database | None = None
        self._thread = threading.Thread(target=self._work, name="janitor", daemon=True)

    def start(self, database: Database) -> None:
        """Begin, with what an earlier server has left."""
        self._database = database
        with database.read() as connection:
            for path in _marked(connection):
                self._paths.put(path)
        self._thread.start()

    def discard(self, transaction: Transaction, path: str) -> None:
        """Have a directory removed after the commit; nothing may name it any more."""
        transaction.run("INSERT INTO discarded (path) VALUES (?)", (path,))
        transaction.then.append(partial(self._paths.put, path))

    def close(self) -> None:
        """Remove what is waiting, then end."""
        if self._thread.is_alive():
            self._paths.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (path := self._paths.get()) is not None:
            try:
                _remove(path)
            except OSError as error:
                logger.warning(
                    "%s could not be removed: %s; the next start tries again", path, error
                )
            else:
                self._forget(path)

    def _forget(self, path: str) -> None:
        assert self._database is not None
        gone = delete(discarded).where(discarded.c.path == path)
        try:
            self._database.write_now(lambda transaction: transaction.connection.execute(gone))
        except StorageError as error:  # its mark stays, and does no harm
            logger.info("%s is gone, and still marked: %s", path, error)


def _marked(connection: Connection) -> list[str]:
    return list(connection.scalars(select(discarded.c.path)))


def _remove(path: str) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
