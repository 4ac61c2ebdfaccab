"""Health of the server: database and free disk space."""

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
"""Maximum wait of a request for the disk check; a later request gets its result."""
_READ_TIMEOUT_S = 5.0
"""Timeout of the database, after which the server is unhealthy."""
_STALLED_S = 10.0
"""Time without a commit while jobs are pending, after which the server is unhealthy."""
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
        """Check that the database can be read and written and that its disk is not full.

        Raises:
            StoreError: If it cannot be read in time, the writer makes no progress although jobs are
                pending, or the disk is full.
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
        if self._reading is None or self._reading.done():  # concurrent requests share a check
            self._reading = asyncio.create_task(asyncio.to_thread(self._read_now))
            self._reading.add_done_callback(_note_failure)
        await asyncio.wait((self._reading,), timeout=_READ_TIMEOUT_S)
        if not self._reading.done():
            msg = f"the database has not answered within {_READ_TIMEOUT_S:g} s; try again"
            raise StoreError(msg)
        self._reading.result()

    async def _check_disk(self) -> None:
        """Write to the database and check for free disk space, with a short timeout."""
        now = time.monotonic()
        if self._writing is None or (self._writing.done() and now >= self._next_write):
            self._next_write = now + _DISK_CHECK_PERIOD_S
            self._writing = asyncio.create_task(self._write())
            self._writing.add_done_callback(_note_failure)
        await asyncio.wait((self._writing,), timeout=_DISK_CHECK_TIMEOUT_S)
        error = self._writing.exception() if self._writing.done() else None
        if isinstance(error, StoreError) and error.disk_full:
            raise error
        if self._database.disk_was_full(_DISK_CHECK_PERIOD_S):
            msg = "disk full"
            raise StoreError.of(msg)

    async def _write(self) -> None:
        await asyncio.to_thread(self._reserve_space)
        await self._database.write(_write_probe)

    def _reserve_space(self) -> None:
        """Check that a file of 1 MB can be allocated next to the data.

        Overwriting an existing page would need no new space.
        """
        folders = {self._home}
        if self._database.file is not None:
            folders.add(self._database.file.absolute().parent)
        for folder in folders:
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
