"""The database: readers of their own, and one writer that commits jobs in groups.

Every change is a *job*, a function of a :class:`Transaction`. One thread runs all jobs, many in
one database transaction when they come fast, and tells their callers only after the commit. So
there are no lock conflicts, a change is whole or absent, and a burst of small reports costs one
disk flush. Jobs must be repeatable: when a group fails, each of its jobs is run again alone.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError

from zerolab.errors import ConfigError
from zeroserver.errors import StorageError

__all__ = ["Change", "Database", "Job", "Transaction", "raw_rows", "sqlite_url"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GROUP = 256
_BUSY_TIMEOUT_S = 30


@dataclass(frozen=True)
class Change:
    """Something that others may be waiting for, told after the commit.

    Args:
        topic: ``agents``, ``run:7``; long polls wait for topics.
        experiment_id: For the event streams; 0 when the change is not of an experiment.
        kind: Name of the event in the streams; empty for a change that only wakes long polls.
        resource: Id of the changed thing, or the event's data where it has no id.
    """

    topic: str
    experiment_id: int = 0
    kind: str = ""
    resource: Any = None


@dataclass
class Transaction:
    """What a job works with."""

    connection: Connection
    sqlite: bool
    changes: list[Change] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Called when the work is rolled back, to forget what was kept in memory."""
    then: list[Callable[[], None]] = field(default_factory=list)
    """Called after the commit, on the writer's thread; must be quick."""

    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> int:
        """Run one statement, written with ``?``, for many rows; return the rows it touched."""
        if not rows:
            return 0
        cursor = _cursor(self.connection)
        cursor.executemany(_text(self.connection, statement), rows)
        return int(cursor.rowcount)

    def raw(self, statement: str, row: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run one statement, written with ``?``, and return its rows."""
        return raw_rows(self.connection, statement, row)

    def run(self, statement: str, row: tuple[Any, ...] = ()) -> int:
        """Run one statement, written with ``?``; return the rows it touched."""
        cursor = _cursor(self.connection)
        cursor.execute(_text(self.connection, statement), row)
        return int(cursor.rowcount)


def raw_rows(
    connection: Connection, statement: str, row: tuple[Any, ...] = ()
) -> list[tuple[Any, ...]]:
    """Run a query, written with ``?``, on the driver itself: 20 times less overhead a statement.

    What the driver raises is translated where the transaction ends.
    """
    cursor = _cursor(connection)
    cursor.execute(_text(connection, statement), row)
    found: list[tuple[Any, ...]] = cursor.fetchall()
    return found


def _cursor(connection: Connection) -> Any:
    driver: Any = connection.connection.driver_connection
    return driver.cursor()


def _text(connection: Connection, statement: str) -> str:
    return statement if connection.dialect.name == "sqlite" else statement.replace("?", "%s")


Job = Callable[[Transaction], T]


@dataclass
class _Pending:
    job: Job[Any]
    future: Future[Any]
    changes: list[Change] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)


class Database:
    """Opens the database, hands out reading connections and runs the writer.

    Args:
        url: SQLAlchemy URL, ``sqlite:///PATH`` or ``postgresql://...``.
        on_commit: Told the changes of each committed group, on the writer's thread.
        synchronous: SQLite's; ``full`` or ``normal``.
    """

    def __init__(
        self, url: str, on_commit: Callable[[list[Change]], None], synchronous: str = "full"
    ) -> None:
        self.url = _with_driver(make_url(url))
        self.sqlite = self.url.get_backend_name() == "sqlite"
        self._on_commit = on_commit
        self._readers = _engine(self.url, "BEGIN", 8, synchronous)
        self._writers = _engine(self.url, "BEGIN IMMEDIATE", 1, synchronous)
        self._driver: Any = self._readers.dialect.loaded_dbapi
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_loop, name="writer", daemon=True)
        self._closed = False
        self.groups = 0
        self.jobs = 0

    @property
    def writer_engine(self) -> Engine:
        """For migrations, before :meth:`start`."""
        return self._writers

    @property
    def waiting(self) -> int:
        """How many jobs wait for the writer."""
        return self._queue.qsize()

    def start(self) -> None:
        """Start the writer."""
        self._thread.start()

    def close(self) -> None:
        """Finish the jobs that were submitted, then close every connection."""
        self._closed = True
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._readers.dispose()
        self._writers.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection with one consistent view, for reading.

        Raises:
            StorageError: If the database cannot be read now.
        """
        try:
            with self._readers.begin() as connection:
                yield connection
        except Exception as error:
            told = self._told(error)
            if told is error:
                raise
            raise told from error

    def submit(self, job: Job[T]) -> "Future[T]":
        """Queue a job; the future is done after its commit.

        Raises:
            StorageError: If the database is closed.
        """
        if self._closed:
            msg = "the server is stopping; try again when it is back"
            raise StorageError(msg)
        future: Future[T] = Future()
        self._queue.put(_Pending(job, future))
        return future

    async def write(self, job: Job[T]) -> T:
        """Run a job and wait for its commit, without blocking the event loop."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(job)))

    def write_now(self, job: Job[T]) -> T:
        """Run a job and wait for its commit, on a thread that may block."""
        return self.submit(job).result()

    def _write_loop(self) -> None:
        while True:
            first = self._queue.get()
            if first is None:
                return
            group, last = [first], False
            while len(group) < _GROUP and not self._queue.empty():
                pending = self._queue.get()
                if pending is None:
                    last = True
                    break
                group.append(pending)
            if not self._commit(group):
                for pending in group:
                    self._commit([pending])
            if last:
                return

    def _commit(self, group: list[_Pending]) -> bool:
        """Run the jobs in one transaction; return whether every future has its answer."""
        alone = len(group) == 1
        undo: list[Callable[[], None]] = []
        try:
            with self._writers.begin() as connection:
                answers = [self._run(connection, each, undo, alone=alone) for each in group]
        except BaseException as error:  # noqa: BLE001 - the caller of the job gets it
            for step in undo:
                step()
            if not alone:
                return False
            group[0].future.set_exception(self._told(error))
            return True
        self.groups += 1
        self.jobs += len(group)
        changes = [change for pending in group for change in pending.changes]
        for pending in group:
            for step in pending.then:
                step()
        if changes:
            self._on_commit(changes)
        for pending, result, failed in answers:
            if failed is None:
                pending.future.set_result(result)
            else:
                pending.future.set_exception(failed)
        return True

    def _told(self, error: BaseException) -> BaseException:
        """Turn an error of the database into one for the one who asked."""
        found = error.orig if isinstance(error, DBAPIError) else error
        told = error
        if isinstance(found, self._driver.OperationalError | self._driver.InterfaceError):
            logger.warning("the database failed: %s", found)
            told = StorageError.of(str(found))
        elif isinstance(found, self._driver.DataError | OverflowError):
            told = ConfigError("request", [f"a value cannot be stored: {found}"])
        if told is not error:
            told.__cause__ = error
        return told

    def _run(
        self,
        connection: Connection,
        pending: _Pending,
        undo: list[Callable[[], None]],
        *,
        alone: bool,
    ) -> tuple[_Pending, Any, BaseException | None]:
        transaction = Transaction(connection, self.sqlite)
        pending.changes, pending.then = transaction.changes, transaction.then
        undo_group = undo
        if alone:  # no savepoint: an exception rolls everything back
            transaction.undo = undo_group
            return pending, pending.job(transaction), None
        connection.exec_driver_sql("SAVEPOINT job")
        try:
            result = pending.job(transaction)
        except (DBAPIError, self._driver.Error, OverflowError):
            undo_group.extend(transaction.undo)
            raise
        except Exception as error:  # noqa: BLE001 - the caller of the job gets it
            connection.exec_driver_sql("ROLLBACK TO SAVEPOINT job")
            for step in transaction.undo:
                step()
            transaction.changes.clear()
            transaction.then.clear()
            return pending, None, error
        connection.exec_driver_sql("RELEASE SAVEPOINT job")
        undo_group.extend(transaction.undo)
        return pending, result, None


def sqlite_url(path: Path) -> str:
    """Return the URL of a SQLite file."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def _with_driver(url: URL) -> URL:
    if url.get_backend_name() == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    return url


def _engine(url: URL, begin: str, size: int, synchronous: str) -> Engine:
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_size=size, max_overflow=size, pool_pre_ping=True)
    engine = create_engine(
        url,
        pool_size=size,
        max_overflow=32,
        connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        # The driver must not begin transactions by itself: it does so too late, and not for reads.
        connection.isolation_level = None
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={synchronous.upper()}",
            "foreign_keys=ON",
            "temp_store=MEMORY",
            "cache_size=-65536",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
