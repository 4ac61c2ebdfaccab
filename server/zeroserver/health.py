"""Health of the server: whether its database can be read and written, and its disk has room."""

import asyncio
import os
import tempfile
import time
from pathlib import Path

from sqlalchemy import text

from zeroserver.errors import StoreError
from zeroserver.store.database import Database, Transaction

__all__ = ["HealthCheck"]

_DISK_CHECK_PERIOD_S = 5.0
"""Seconds between two checks of the disk."""
_DISK_CHECK_TIMEOUT_S = 1.0
"""Seconds that a request waits for a check of the disk; a later request gets its result."""
_READ_TIMEOUT_S = 5.0
"""Seconds after which a database that has not answered is unhealthy."""
_STALLED_S = 10.0
"""Seconds without a commit while changes wait, after which the server reports itself unhealthy."""
_MIN_FREE_BYTES = 1024 * 1024
"""Minimum free bytes of the disk; SQLite needs some even to delete."""


class HealthCheck:
    """Health check of the database and its disk; used on the event loop's thread.

    Args:
        database: The server's database.
        home: Folder of the server's files.
    """

    def __init__(self, database: Database, home: Path) -> None:
        self._database = database
        self._home = home
        self._reading: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._next_write = 0.0

    async def check(self) -> None:
        """Check that the database can be read and written, and that its disk has room.

        Raises:
            StoreError: If it cannot be read, or does not answer soon; if the writer has made no
                change for a while although some wait; if the disk takes no more.
        """
        await self._check_reading()
        self._check_writer()
        await self._check_disk()

    def _check_writer(self) -> None:
        stalled_s = self._database.stalled_s
        if stalled_s > _STALLED_S:
            msg = (
                f"the database has stored nothing for {stalled_s:.0f} s although "
                f"{self._database.waiting + 1} change(s) wait; see the server's log"
            )
            raise StoreError(msg)

    async def _check_reading(self) -> None:
        if self._reading is None or self._reading.done():  # concurrent requests share one
            self._reading = asyncio.create_task(asyncio.to_thread(self._read_now))
            self._reading.add_done_callback(_note_failure)
        await asyncio.wait((self._reading,), timeout=_READ_TIMEOUT_S)
        if not self._reading.done():
            msg = f"the database has not answered within {_READ_TIMEOUT_S:g} s; try again"
            raise StoreError(msg)
        self._reading.result()

    async def _check_disk(self) -> None:
        """Write to the database and periodically reserve disk space, without waiting for others."""
        now = time.monotonic()
        if self._writing is None or (self._writing.done() and now >= self._next_write):
            self._next_write = now + _DISK_CHECK_PERIOD_S
            self._writing = asyncio.create_task(self._write())
            self._writing.add_done_callback(_note_failure)
        await asyncio.wait((self._writing,), timeout=_DISK_CHECK_TIMEOUT_S)
        failed = self._writing.exception() if self._writing.done() else None
        if isinstance(failed, StoreError) and failed.disk_full:
            raise failed
        if self._database.disk_was_full(_DISK_CHECK_PERIOD_S):
            msg = "disk full"
            raise StoreError.of(msg)

    async def _write(self) -> None:
        await asyncio.to_thread(self._reserve_space)
        await self._database.write(_write_probe)

    def _reserve_space(self) -> None:
        """Check that a file of 1 MB can be written next to the data.

        Writing an existing page again needs no new space, so it would prove nothing.
        """
        places = {self._home}
        if self._database.file is not None:
            places.add(self._database.file.absolute().parent)
        for folder in places:
            try:
                with tempfile.TemporaryFile(dir=folder) as file:
                    os.posix_fallocate(file.fileno(), 0, _MIN_FREE_BYTES)
            except OSError as error:
                raise StoreError.of_file(error, folder) from error

    def _read_now(self) -> None:
        with self._database.probe() as connection:
            connection.execute(text("SELECT 1"))


def _note_failure(task: "asyncio.Task[None]") -> None:
    """Retrieve a task's exception, since its creator may not wait for it."""
    if not task.cancelled():
        task.exception()


def _write_probe(transaction: Transaction) -> int:
    """Write a page without changing its content."""
    return transaction.run("UPDATE alembic_version SET version_num = version_num")
