"""Lock that gives one server exclusive use of its database.

SQLite: a lock on one byte of the database file, far behind the bytes that SQLite locks. It belongs
to the open file, so it also holds for other paths and hard links, and after ``server.lock`` was
removed.

PostgreSQL: a session-level advisory lock on the writer's connection, one per schema. Only the
session that holds the lock can commit changes. After a lost connection the new one must acquire the
lock again, and the row in ``server_lock`` must still name this server, since caches are invalid
once another server has changed the database.
"""

import fcntl
import logging
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from zerolab.errors import ConflictError
from zeroserver.errors import StoreError

__all__ = ["LockLostError", "ServerLock", "lock_file"]

logger = logging.getLogger(__name__)

_LOCK_BYTE = 2**62
_LOCK_CLASS = 0x7E201AB
"""First key of the advisory lock; the second one is the schema."""
_WAIT_S = 5.0
"""Timeout for a closing session, such as that of a killed server."""
_POLL_S = 0.05

_SESSION = (
    # A machine that disappeared loses its lock within a minute.
    "SET tcp_keepalives_idle = 30",
    "SET tcp_keepalives_interval = 10",
    "SET tcp_keepalives_count = 3",
)
_SCHEMA = "SELECT oid::bigint FROM pg_namespace WHERE nspname = current_schema()"
_TRY = "SELECT pg_try_advisory_lock(%s, %s)"
_HOLDER = (
    "SELECT a.pid, a.application_name, coalesce(a.client_addr::text, 'this machine') "
    "FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND l.classid::bigint = %s AND l.objid::bigint = %s"
)
_INSTANCE = "SELECT instance, host, pid FROM server_lock WHERE id = 1"
_SIGN = (
    "INSERT INTO server_lock (id, instance, host, pid, started_at) VALUES (1, ?, ?, ?, ?) "
    "ON CONFLICT (id) DO UPDATE SET instance = excluded.instance, host = excluded.host, "
    "pid = excluded.pid, started_at = excluded.started_at"
)


class LockLostError(StoreError):
    """Error: another server uses the database, so this one must stop."""


def lock_file(path: Path) -> int:
    """Lock a SQLite file for this process; return the descriptor that holds the lock.

    Close it only after all connections to the file: closing any descriptor of a file releases the
    locks that SQLite holds on it.

    Raises:
        ConflictError: If another process holds it.
        OSError: If the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):
            request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _LOCK_BYTE, 1, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        msg = (
            f"another server already works on the database {path}; stop it with `zerolab down`, "
            "or name another data directory with --home"
        )
        raise ConflictError(msg) from None
    except OSError as error:
        # The file system has no locks, so SQLite cannot protect its own writes either.
        logger.warning("the database %s cannot be locked: %s", path, error)
    return descriptor


class ServerLock:
    """Lock of a server on its database, held while the server runs.

    Args:
        path: SQLite file; None for PostgreSQL or in memory.
        writers: Engine of the writer; its pool must have at most one connection.
        name: Name of the database, for messages.
    """

    def __init__(self, path: Path | None, writers: Engine, name: str) -> None:
        self.instance = uuid.uuid4().hex
        self.on_lost: Callable[[str], None] = logger.error
        """Called once on the writer thread when another server has taken over the database."""
        self._path = path
        self._writers = writers
        self._name = name
        self._descriptor: int | None = None
        self._held = False
        self._signed = False
        self._lost = ""

    def acquire(self) -> None:
        """Acquire the lock; no effect if this server already holds it.

        Raises:
            ConflictError: If another server holds it.
        """
        if self._held:
            return
        if self._path is not None:
            self._descriptor = lock_file(self._path)
        elif self._writers.dialect.name == "postgresql":
            event.listen(self._writers, "connect", self._on_connect)
            try:
                self._writers.connect().close()
            except BaseException:
                event.remove(self._writers, "connect", self._on_connect)
                raise
        self._held = True

    def sign(self, transaction: Any) -> None:
        """Record in the database that this server holds the lock."""
        row = (self.instance, socket.gethostname(), os.getpid(), time.time())
        transaction.run(_SIGN, row)
        transaction.then.append(self._note_signed)

    def release(self) -> None:
        """Release the lock after every connection has been closed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._held = False

    def _note_signed(self) -> None:
        self._signed = True

    def _on_connect(self, connection: Any, _record: Any) -> None:
        """Acquire the advisory lock on a new connection of the writer."""
        try:
            self._lock_session(connection)
        except BaseException:
            connection.close()  # the pool does not know it yet
            raise

    def _lock_session(self, connection: Any) -> None:
        if self._lost:
            raise LockLostError(self._lost)
        with connection.cursor() as cursor:
            for statement in _SESSION:
                cursor.execute(statement)
            cursor.execute("SELECT set_config('application_name', %s, false)", (self._own_name,))
            holder = self._try(connection, cursor)
            if holder is None and self._signed:
                holder = self._successor(cursor)
        connection.commit()
        if holder is None:
            return
        if not self._held:
            raise ConflictError(
                f"another server already works on the database {self._name} ({holder}); stop it, "
                "or name another database with --database"
            )
        self._lost = (
            f"another server has taken over the database {self._name} ({holder}) while the "
            "connection that held the lock was lost; this server stops"
        )
        self.on_lost(self._lost)
        raise LockLostError(self._lost)

    @property
    def _own_name(self) -> str:
        return f"zerolab {self.instance}"

    def _try(self, connection: Any, cursor: Any) -> str | None:
        """Acquire the lock; return a description of its owner if another server holds it."""
        row = cursor.execute(_SCHEMA).fetchone()
        schema = row[0] if row else 0
        key = schema - 2**32 if schema >= 2**31 else schema  # an oid as a signed integer
        deadline = time.monotonic() + _WAIT_S
        while not cursor.execute(_TRY, (_LOCK_CLASS, key)).fetchone()[0]:
            holder = cursor.execute(_HOLDER, (_LOCK_CLASS, schema)).fetchone()
            if (
                holder is not None and holder[1] == self._own_name
            ):  # own session of a lost connection
                cursor.execute("SELECT pg_terminate_backend(%s)", (holder[0],))
            elif holder is not None and time.monotonic() > deadline:
                return f"its PostgreSQL session has the process id {holder[0]}, from {holder[2]}"
            connection.commit()
            time.sleep(_POLL_S)
        return None

    def _successor(self, cursor: Any) -> str | None:
        """Return a description of the server that used the database since, if any."""
        row = cursor.execute(_INSTANCE).fetchone()
        if row is None or row[0] == self.instance:
            return None
        return f"process {row[2]} on {row[1]}"
