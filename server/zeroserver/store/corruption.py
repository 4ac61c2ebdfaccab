"""Which tables of a SQLite file can be read to their end, when it is known to be damaged."""

import contextlib
import sqlite3
import time
from pathlib import Path

from zeroserver.store.schema import metadata

__all__ = ["damaged_tables"]

_LONGEST_S = 10.0
_LOOK = 100_000
"""Steps of SQLite's machine between two looks at the clock."""


def damaged_tables(file: Path) -> list[str]:
    """Return the names of our tables that cannot be read, as far as some seconds show."""
    end = time.monotonic() + _LONGEST_S
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > end, _LOOK)
        return [name for name in metadata.tables if _is_damaged(connection, name)]


def _is_damaged(connection: sqlite3.Connection, table: str) -> bool:
    try:
        for _ in connection.execute(f"SELECT * FROM {table} NOT INDEXED"):  # noqa: S608 - our own names
            pass
    except sqlite3.OperationalError:  # the time is over
        return False
    except sqlite3.DatabaseError:
        return True
    return False
