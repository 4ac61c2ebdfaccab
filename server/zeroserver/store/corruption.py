"""Detection of unreadable tables in a damaged SQLite file."""

import contextlib
import sqlite3
import time
from pathlib import Path

from zeroserver.store.schema import metadata

__all__ = ["damaged_tables"]

_TIMEOUT_S = 10.0
_STEPS_PER_CHECK = 100_000
"""Virtual machine instructions of SQLite between two checks of the clock."""


def damaged_tables(file: Path) -> list[str]:
    """Return the names of unreadable tables; the search stops after 10 s."""
    deadline = time.monotonic() + _TIMEOUT_S
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_PER_CHECK)
        return [name for name in metadata.tables if _is_damaged(connection, name)]


def _is_damaged(connection: sqlite3.Connection, table: str) -> bool:
    try:
        for _ in connection.execute(f"SELECT * FROM {table} NOT INDEXED"):  # noqa: S608 - our own names
            pass
    except sqlite3.OperationalError:  # interrupted by the timeout
        return False
    except sqlite3.DatabaseError:
        return True
    return False
