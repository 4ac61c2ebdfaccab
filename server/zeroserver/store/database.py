"""Database access: concurrent readers, and one writer that commits jobs in groups.

Every change is a *job*, a function of a :class:`Transaction`. One thread runs all jobs. Under load
it commits many of them in one database transaction, and returns their results after the commit.
This avoids lock conflicts, keeps each change atomic, and flushes a burst of small reports to the
disk only once. Jobs must be repeatable: if one of a group fails, all of them are run again.
"""

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from sqlalchemy import Connection, Engine, event, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from zerolab.errors import ConfigError
from zeroserver.errors import StoreError
from zeroserver.store.engine_factory import open_engine, with_driver
from zeroserver.store.lock import ServerLock
from zeroserver.visibility import visible_rows

__all__ = ["Change", "Database", "Job", "Transaction", "raw_rows"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GROUP = 256
_START_TIMEOUT_S = 10.0
"""Timeout for a job to start; the caller may then retry."""
_LONG_JOB_S = 1.0
"""CPU time of a job above which it is logged; no job should take more than 0.2 s."""
_LOG_INTERVAL_S = 60.0
_STOPPING = "the server is stopping; try again when it is back"
_EMPTY_WAL_S = 0.2
"""Maximum wait for readers; it also blocks the writer."""
_SQLITE_BUSY, _SQLITE_LOCKED = 5, 6
_POSTGRESQL_LOCKED = "55P03"


class Change(msgspec.Struct, frozen=True):
    """Notification of a change, published after the commit.

    Args:
        topic: ``agents``, ``run:7``; long polls wait for topics.
        experiment_id: Experiment of the event streams; 0 if the change belongs to none.
        kind: Name of the event in the streams; empty for a change that only wakes long polls.
        resource: Id of the changed object, or the data of the event.
    """

    topic: str
    experiment_id: int = 0
    kind: str = ""
    resource: Any = None


class Transaction:
    """Transaction of a job: connection, changes, and callbacks for rollback and commit.

    Args:
        connection: Connection of the writer.
        sqlite: Whether the database is SQLite.
        cursor: Cursor of the driver, which all jobs of a group share.
    """

    def __init__(self, connection: Connection, sqlite: bool, cursor: Any) -> None:  # noqa: FBT001
        self.connection = connection
        self.sqlite = sqlite
        self.cursor = cursor
        self.changes: list[Change] = []
        self.undo: list[Callable[[], None]] = []
        """Called on rollback in reverse order, to restore in-memory caches."""
        self.then: list[Callable[[], None]] = []
        """Called after the commit, on the writer thread; must be fast."""

    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> int:
        """Run a statement with ``?`` parameters for many rows; return the rows affected."""
        if not rows:
            return 0
        self.cursor.executemany(self._text(statement), rows)
        return int(self.cursor.rowcount)

    def raw(self, statement: str, row: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a statement with ``?`` parameters; return its rows."""
        self.cursor.execute(self._text(statement), row)
        rows: list[tuple[Any, ...]] = self.cursor.fetchall()
        return rows

    def run(self, statement: str, row: tuple[Any, ...] = ()) -> int:
        """Run a statement with ``?`` parameters; return the number of affected rows."""
        self.cursor.execute(self._text(statement), row)
        return int(self.cursor.rowcount)

    def _text(self, statement: str) -> str:
        return statement if self.sqlite else statement.replace("?", "%s")


def raw_rows(
    connection: Connection, statement: str, row: tuple[Any, ...] = ()
) -> list[tuple[Any, ...]]:
    """Run a query with ``?`` parameters directly on the driver; return its rows.

    This has 20 times less overhead per statement than SQLAlchemy. Errors of the driver are
    translated at the end of the transaction.
    """
    sqlite = connection.dialect.name == "sqlite"
    statement = visible_rows(statement, sqlite=sqlite)
    if not sqlite:
        statement = statement.replace("?", "%s")
    cursor = _driver_of(connection).cursor()
    cursor.execute(statement, row)
    rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def _restrict(
    connection: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any
) -> tuple[str, Any]:
    """Hide rows from the query of a reader, as :func:`raw_rows` does."""
    return visible_rows(statement, sqlite=connection.dialect.name == "sqlite"), parameters


def _driver_of(connection: Connection) -> Any:
    return connection.connection.driver_connection


@contextmanager
def _sqlite_transaction(connection: Connection, begin: str) -> Iterator[None]:
    """Begin and end a transaction on the driver, with a tenth of SQLAlchemy's overhead."""
    driver = _driver_of(connection)
    try:
        driver.execute(begin)
        yield
        if connection.in_transaction():  # a statement was executed by SQLAlchemy
            connection.commit()
        else:
            driver.commit()
    except BaseException:
        with suppress(Exception):  # the pool replaces a connection that fails here
            driver.rollback()
        raise


Job = Callable[[Transaction], T]


class _Pending:
    """Queued job.

    Args:
        job: Function to run in a transaction.
        finish: Called once on the writer thread, with the result or the error. Not called for a
            withdrawn job.
    """

    def __init__(self, job: Job[Any], finish: Callable[[Any, BaseException | None], None]) -> None:
        self.job = job
        self.finish = finish
        self.changes: list[Change] = []
        self.then: list[Callable[[], None]] = []
        self.deadline = time.monotonic() + _START_TIMEOUT_S
        self.withdrawn = False
        self._begun = False
        self._claim = threading.Lock()
        """Acquired once: by the writer that runs the job, or by a caller that withdraws it. This
        is cheaper than the state and the condition of a concurrent.futures.Future."""

    def begin(self) -> bool:
        """Mark the job as running and return True, unless its caller has withdrawn it."""
        self._begun = self._begun or self._claim.acquire(blocking=False)
        return self._begun

    def withdraw(self) -> bool:
        """Prevent the job from running; return False if it has begun."""
        self.withdrawn = self.withdrawn or self._claim.acquire(blocking=False)
        return self.withdrawn


class Database:
    """Database with a pool of reading connections and a writer thread.

    Args:
        url: SQLAlchemy URL, ``sqlite:///PATH`` or ``postgresql://...``.
        on_commit: Called with the changes of each committed group, on the writer thread.
        synchronous: SQLite's ``synchronous`` setting, ``full`` or ``normal``.
    """

    def __init__(
        self, url: str, on_commit: Callable[[list[Change]], None], synchronous: str = "full"
    ) -> None:
        self.url = with_driver(make_url(url))
        self.sqlite = self.url.get_backend_name() == "sqlite"
        self._on_commit = on_commit
        self._readers = open_engine(self.url, "BEGIN", 8, synchronous)
        self._writers = open_engine(self.url, "BEGIN IMMEDIATE", 1, synchronous, 0)
        self._probes = open_engine(self.url, "BEGIN", 1, synchronous, 0)
        event.listen(self._readers, "before_cursor_execute", _restrict, retval=True)
        self.lock = ServerLock(self.file, self._writers, self.name)
        self._driver: Any = self._readers.dialect.loaded_dbapi
        self._writing: Connection | None = None
        """Idle connection of the writer to a SQLite file, between transactions."""
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_loop, name="writer", daemon=True)
        self._next_damage_log = 0.0
        self.deleted = False
        """Whether the WAL may contain deleted rows; see :meth:`empty_wal`."""
        self._closed = False
        self._disposed = False
        self._ending = False
        self.groups = 0
        self.jobs = 0
        self._progress_at: float | None = None
        """Monotonic time of the writer's last progress; None while idle."""
        self._locked = False
        """Whether the last attempt failed because of another process's lock."""
        self._disk_full_at: float | None = None
        self.longest_job_s = 0.0
        """Maximum CPU time of one job."""

    @property
    def name(self) -> str:
        """URL without the password."""
        return self.url.render_as_string(hide_password=True)

    @property
    def file(self) -> Path | None:
        """File of a SQLite database; None in memory and for PostgreSQL."""
        name = self.url.database or ":memory:"
        if not self.sqlite or name == ":memory:" or "mode=memory" in name:
            return None
        return Path(urlsplit(name).path if name.startswith("file:") else name)

    @property
    def writer_engine(self) -> Engine:
        """Engine for migrations, before :meth:`start`."""
        return self._writers

    @property
    def waiting(self) -> int:
        """Number of jobs in the writer's queue."""
        return self._queue.qsize()

    @property
    def stalled_s(self) -> float:
        """Seconds since the writer's last progress while jobs are pending; 0 while idle."""
        since = self._progress_at
        return 0.0 if since is None else time.monotonic() - since

    def disk_was_full(self, within_s: float) -> bool:
        """Check whether a job failed recently because the disk was full."""
        failed_at = self._disk_full_at
        return failed_at is not None and time.monotonic() - failed_at < within_s

    @property
    def started(self) -> bool:
        """Whether the writer has been started."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the writer."""
        self._thread.start()

    def close(self) -> None:
        """Finish all submitted jobs, then close all connections."""
        self._closed = True
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self._writing is not None:
            self._writing.close()
        self._disposed = True
        for engine in (self._readers, self._writers, self._probes):
            engine.dispose()
        self.lock.release()

    def empty_wal(self) -> None:
        """Checkpoint and truncate the WAL of a SQLite file, if rows were deleted.

        Otherwise old page contents would stay in the WAL until overwritten. While a reader uses an
        older snapshot this has no effect, and the next call retries.
        """
        if self.file is None or not self.deleted:
            self.deleted = False
            return
        self.deleted = False
        with closing(sqlite3.connect(self.file, timeout=_EMPTY_WAL_S)) as connection:
            try:
                (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.OperationalError:
                busy = 1
        self.deleted = self.deleted or bool(busy)

    def read(self) -> AbstractContextManager[Connection]:
        """Open a connection for reading with a consistent snapshot.

        Raises:
            StoreError: If the database cannot be read now.
        """
        return self._reading(self._readers)

    def probe(self) -> AbstractContextManager[Connection]:
        """Open a connection for reading that is reserved for health checks."""
        return self._reading(self._probes)

    @contextmanager
    def _reading(self, engine: Engine) -> Iterator[Connection]:
        if self._disposed:
            raise StoreError(_STOPPING)
        pool = engine.pool  # gets the connection back
        try:
            if not self.sqlite:
                with engine.begin() as connection:
                    yield connection
                return
            with engine.connect() as connection, _sqlite_transaction(connection, "BEGIN"):
                yield connection
        except Exception as error:
            translated = self.translate(error)
            if translated is error:
                raise
            raise translated from error
        finally:
            if self._disposed:  # closed during this read
                pool.dispose()

    def submit(self, job: Job[T]) -> "Future[T]":
        """Queue a job; its future completes after the commit.

        Raises:
            StoreError: If the database is closed.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled

        def finish(result: T, error: BaseException | None) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._enqueue(_Pending(job, finish))
        return future

    def _enqueue(self, pending: _Pending) -> None:
        if self._closed:
            raise StoreError(_STOPPING)
        self._queue.put(pending)

    async def write(self, job: Job[T]) -> T:
        """Run a job and wait for its commit, without blocking the event loop.

        Raises:
            StoreError: If it could not start within the timeout; it will not run.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[T, BaseException | None]] = loop.create_future()

        def finish(*result: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_set, outcome, result)

        def give_up() -> None:
            if pending.withdraw():
                _set(outcome, (None, _busy()))

        pending = _Pending(job, finish)
        self._enqueue(pending)
        timer = loop.call_later(_START_TIMEOUT_S, give_up)
        try:
            result, error = await outcome  # cancelling this wait does not cancel the job
        finally:
            timer.cancel()
        if error is not None:
            raise error
        return result

    def write_now(self, job: Job[T]) -> T:
        """Run a job and block until its commit."""
        return self.submit(job).result()

    def _write_loop(self) -> None:
        waiting: list[_Pending] = []
        while self._take(waiting):
            waiting = self._run_group(waiting)

    def _take(self, group: list[_Pending]) -> bool:
        """Fill a group with queued jobs; return False at the end of the queue on shutdown."""
        while len(group) < _GROUP and not self._ending:
            if self._queue.empty():
                if group:
                    break
                if not self._locked:
                    self._progress_at = None
            pending = self._queue.get()
            if self._progress_at is None:
                self._progress_at = time.monotonic()
            if pending is None:
                self._ending = True
            else:
                group.append(pending)
        return bool(group)

    def _run_group(self, group: list[_Pending]) -> list[_Pending]:
        """Run a group, or its jobs one by one if it fails; return jobs blocked by a lock."""
        try:
            # Most jobs succeed, so savepoints, which cost a tenth of a report, are only used after
            # one did not.
            if self._commit(group) or self._commit(group, savepoints=True):
                return []
            while group:
                self._commit(group[:1])
                group = group[1:]
        except _LockedError as error:
            self._locked = True
            logger.warning("the database is locked: %s", error)
        return [pending for pending in group if not _is_abandoned(pending)]

    def _commit(self, group: list[_Pending], *, savepoints: bool = False) -> bool:
        """Run the jobs in one transaction; return whether all are finished.

        Args:
            group: The jobs.
            savepoints: Whether a job that raises rolls back only its own changes. Otherwise it
                rolls back the transaction.

        Raises:
            _LockedError: If another process has locked the database; no job has run.
        """
        is_single = len(group) == 1
        undo: list[Callable[[], None]] = []
        try:
            with self._begin() as connection:
                cursor = _driver_of(connection).cursor()
                # One commit, and so one fsync, for all queued jobs: under load the writer's
                # throughput does not depend on the latency of the disk. Callers get their results
                # only after the commit.
                running = [pending for pending in group if pending.begin()]
                results = [
                    self._run(
                        Transaction(connection, self.sqlite, cursor),
                        queued,
                        undo,
                        savepoint=savepoints,
                    )
                    for queued in running
                ]
        except BaseException as error:
            # Restore the caches that the rolled-back jobs changed, in reverse order: each step
            # restores the state from before its own change.
            for step in reversed(undo):
                step()
            if _is_locked(error):
                raise _LockedError(str(error)) from error
            # The group runs again: with savepoints, and after a database error, which aborts the
            # transaction in spite of them, each job separately.
            if not is_single:
                return False
            if group[0].begin():
                group[0].finish(None, self.translate(error))
            self._note_progress()
            return True
        self._note_progress()
        self.groups += 1
        self.jobs += len(results)
        self._follow_up([pending for pending, _, _ in results])
        for pending, result, failed in results:
            pending.finish(result, failed)
        return True

    def _begin(self) -> AbstractContextManager[Connection]:
        """Begin a transaction of the writer."""
        return self._begin_sqlite() if self.sqlite else self._writers.begin()

    @contextmanager
    def _begin_sqlite(self) -> Iterator[Connection]:
        """Begin a transaction on the writer's persistent connection.

        Taking a connection from the pool for each transaction would cost more than a small job.
        """
        connection = self._writing or self._writers.connect()
        self._writing = None
        try:
            with _sqlite_transaction(connection, "BEGIN IMMEDIATE"):
                yield connection
        except BaseException:
            connection.close()
            raise
        self._writing = connection

    def _note_progress(self) -> None:
        self._progress_at, self._locked = time.monotonic(), False

    def _timed(self, job: Job[T], transaction: Transaction) -> T:
        """Run a job, record its CPU time, and log it if it took too long."""
        start = time.thread_time()
        try:
            return job(transaction)
        finally:
            cpu_s = time.thread_time() - start
            self.longest_job_s = max(self.longest_job_s, cpu_s)
            if cpu_s > _LONG_JOB_S:
                name = getattr(job, "__qualname__", repr(job))
                logger.warning("a change took %.1f s of the writer's CPU: %s", cpu_s, name)

    def _follow_up(self, done: list[_Pending]) -> None:
        for pending in done:
            for step in pending.then:
                step()
        changes = [change for pending in done for change in pending.changes]
        if changes:
            self._on_commit(changes)

    def translate(self, error: BaseException) -> BaseException:
        """Convert an error of the database driver into an error for the caller."""
        original = error.orig if isinstance(error, DBAPIError) else error
        translated = error
        damaged = self._driver.DatabaseError  # sqlite3 raises the class itself
        if isinstance(original, PoolTimeoutError):
            translated = StoreError("too many requests at once; retry")
        elif isinstance(original, self._driver.OperationalError | self._driver.InterfaceError):
            logger.warning("the database failed: %s", original)
            translated = full = StoreError.of(str(original))
            if full.disk_full:
                self._disk_full_at = time.monotonic()
        elif isinstance(original, self._driver.InternalError) or type(original) is damaged:
            self._log_damage(str(original))
            translated = StoreError.of_damage(str(original))
        elif isinstance(original, self._driver.DataError | OverflowError):
            translated = ConfigError("request", [f"a value cannot be stored: {original}"])
        if translated is not error:
            translated.__cause__ = error
        return translated

    def _log_damage(self, text: str) -> None:
        """Log a damaged database, at most once a minute; callers get the error each time."""
        if time.monotonic() >= self._next_damage_log:
            self._next_damage_log = time.monotonic() + _LOG_INTERVAL_S
            logger.error("the database is damaged: %s", text)

    def _run(
        self,
        transaction: Transaction,
        pending: _Pending,
        undo: list[Callable[[], None]],
        *,
        savepoint: bool,
    ) -> tuple[_Pending, Any, BaseException | None]:
        pending.changes, pending.then = transaction.changes, transaction.then
        undo_group = undo
        if not savepoint:  # an exception rolls back the whole transaction
            transaction.undo = undo_group
            return pending, self._timed(pending.job, transaction), None
        # A job that raises, for example because of a conflict or a missing row, rolls back only its
        # own changes, not the jobs that share its commit.
        transaction.run("SAVEPOINT job")
        try:
            result = self._timed(pending.job, transaction)
        except (DBAPIError, self._driver.Error, OverflowError):
            undo_group.extend(transaction.undo)
            raise
        except Exception as error:  # noqa: BLE001 - raised to the caller of the job
            transaction.run("ROLLBACK TO SAVEPOINT job")
            for step in reversed(transaction.undo):
                step()
            transaction.changes.clear()
            transaction.then.clear()
            return pending, None, error
        transaction.run("RELEASE SAVEPOINT job")
        undo_group.extend(transaction.undo)
        return pending, result, None


def _set(outcome: "asyncio.Future[Any]", result: Any) -> None:
    if not outcome.done():
        outcome.set_result(result)


class _LockedError(Exception):
    """Error: another process has locked the database."""


def _is_locked(error: BaseException) -> bool:
    original = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(original, "sqlite_errorcode", 0) & 0xFF
    locked = getattr(original, "sqlstate", None) == _POSTGRESQL_LOCKED
    return locked or code in {_SQLITE_BUSY, _SQLITE_LOCKED}


def _is_abandoned(pending: _Pending) -> bool:
    """Check whether a job was withdrawn or timed out; finish it if so."""
    if pending.withdrawn:
        return True
    if time.monotonic() < pending.deadline:
        return False
    if pending.begin():
        pending.finish(None, _busy())
    return True


def _busy() -> StoreError:
    return StoreError(f"the database has been busy for {_START_TIMEOUT_S:g} s; try again")
