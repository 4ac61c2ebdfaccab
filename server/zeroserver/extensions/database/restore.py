"""Restore and check of a server's database; :mod:`zeroserver.store.backup` writes backups."""

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from zerolab.errors import ConfigError
from zerolab.paths import Home
from zeroserver.errors import StoreError
from zeroserver.store.backup import (
    ARCHIVES,
    POSTGRESQL,
    SQLITE,
    back_up,
    copy_archives,
    copy_sqlite,
    file_of,
    open_sqlite,
    run_tool,
    sync_path,
)
from zeroserver.store.database import Database
from zeroserver.store.schema import HEAD, metadata

__all__ = ["check", "restore"]

_BEFORE = "before-restore"
_PROBLEMS = 20


def restore(database: Database, home: Home, source: Path) -> Path | None:
    """Replace the database by a backup; the server must not run.

    Args:
        database: Database that is not open.
        home: Home directory of the installation, with its archives.
        source: Directory written by :func:`back_up`, or a SQLite file.

    Returns:
        Backup of the previous data; None if there was none.

    Raises:
        ConfigError: If the source is not a backup, or of another kind of database.
        ConflictError: If a server uses the database.
        StoreError: If the backup is damaged, or the disk is full.
    """
    content = source
    if source.is_dir():
        content = source / (SQLITE if database.sqlite else POSTGRESQL)
    if not content.is_file():
        kind = "SQLite" if database.sqlite else "PostgreSQL"
        problem = f"{source}: must be a backup of a {kind} database, got no file {content.name}"
        raise ConfigError("restore", [problem])
    if database.sqlite:
        _verify_sqlite(content)
    try:
        database.lock.acquire()
        if database.sqlite:
            before = _save_sqlite(database, home)
            _replace_sqlite(content, file_of(database))
        else:
            before = back_up(database, home, prefix=_BEFORE) if _has_tables(database) else None
            _load_postgresql(database, content)
        if (source / ARCHIVES).is_dir():
            copy_archives(source / ARCHIVES, home.archives)
    except OSError as error:
        raise StoreError.of_file(error, home.path) from error
    finally:
        database.close()
    return before


def check(database: Database, home: Home) -> list[str]:
    """Return the problems of a database, one line each; the server may run.

    Raises:
        ConfigError: If there is no database.
    """
    look = _check_sqlite if database.sqlite else _check_postgresql
    problems = look(database)
    if problems:
        return problems
    with database.read() as connection:
        return [*_schema_problems(connection), *_archive_problems(connection, home)]


def _has_tables(database: Database) -> bool:
    with database.read() as connection:
        return bool(_tables_of(connection))


def _tables_of(connection: Connection) -> set[str]:
    from sqlalchemy import inspect

    return set(inspect(connection).get_table_names())


def _save_sqlite(database: Database, home: Home) -> Path | None:
    """Back up the database that a restore replaces; copy the file if it is damaged."""
    file = file_of(database)
    if not file.stat().st_size:
        return None
    try:
        return back_up(database, home, prefix=_BEFORE)
    except StoreError as error:
        if error.disk_full:
            raise
    target = home.backups / f"{_BEFORE}-damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    target.mkdir(mode=0o700)
    for ending in ("", "-wal"):
        part = file.with_name(file.name + ending)
        if part.exists():
            shutil.copyfile(part, target / part.name)
    return target


def _replace_sqlite(source: Path, target: Path) -> None:
    """Replace a closed database with a copy of a backup."""
    copy = target.with_name(f".{target.name}.restored")
    copy.unlink(missing_ok=True)
    copy_sqlite(source, copy)
    if target.exists() and target.stat().st_size:
        with (
            contextlib.suppress(sqlite3.DatabaseError),  # damaged, but already saved
            contextlib.closing(sqlite3.connect(target)) as old,
        ):
            old.execute("PRAGMA journal_mode=DELETE")  # removes its WAL
    for ending in ("-wal", "-shm"):
        target.with_name(target.name + ending).unlink(missing_ok=True)
    copy.replace(target)
    sync_path(target.parent)


def _verify_sqlite(file: Path) -> None:
    """Check that a file is an undamaged Zerolab database.

    Raises:
        ConfigError: If it is not a Zerolab database, or of a newer version.
        StoreError: If it is damaged.
    """
    problems = _file_problems(file)
    if problems:
        raise StoreError(f"{file}: is damaged: {problems[0]}; use another backup")
    with contextlib.closing(open_sqlite(file, "ro")) as connection:
        try:
            version = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.Error:
            version = None
    if version is None:
        raise ConfigError("restore", [f"{file}: must be a database of Zerolab, got another one"])
    if version[0] > HEAD:
        problem = f"{file}: has schema {version[0]}, but this version knows {HEAD} at most"
        raise ConfigError("restore", [f"{problem}; install the version that wrote it"])


def _check_sqlite(database: Database) -> list[str]:
    file = file_of(database)
    if not file.is_file():
        problem = f"{file}: no such database; name a PostgreSQL database with --database"
        raise ConfigError("database", [problem])
    return _file_problems(file)


def _file_problems(file: Path) -> list[str]:
    try:
        with contextlib.closing(open_sqlite(file, "ro")) as connection:
            rows = connection.execute(f"PRAGMA integrity_check({_PROBLEMS})").fetchall()
            problems = [f"integrity: {line}" for (line,) in rows if line != "ok"]
            keys = connection.execute("PRAGMA foreign_key_check").fetchmany(_PROBLEMS)
            problems += [f"foreign key: row {row[1]} of {row[0]} names no {row[2]}" for row in keys]
    except sqlite3.DatabaseError as error:
        return [f"integrity: {error}"]
    return problems


def _load_postgresql(database: Database, source: Path) -> None:
    """Replace the tables in one transaction, so that a failure has no effect."""
    options = ("--clean", "--if-exists", "--no-owner", "--single-transaction", "--exit-on-error")
    run_tool(database, "pg_restore", *options, str(source))


def _check_postgresql(database: Database) -> list[str]:
    """Read all tables completely; return the errors."""
    problems = []
    with database.read() as connection:
        tables = _tables_of(connection)
        driver: Any = connection.connection.driver_connection
        for name in metadata.tables:
            if name not in tables:
                continue
            try:
                with (
                    driver.transaction(),
                    driver.cursor() as cursor,
                    cursor.copy(f"COPY {name} TO STDOUT") as rows,
                ):
                    for _ in rows:
                        pass
            except driver.Error as error:  # the error is the result
                problems.append(f"table {name}: {str(error).strip().splitlines()[0]}")
    return problems


def _schema_problems(connection: Connection) -> Iterator[str]:
    tables = _tables_of(connection)
    if "alembic_version" not in tables:
        yield "schema: must be that of Zerolab, got another database or an empty one"
        return
    version = connection.scalar(text("SELECT version_num FROM alembic_version"))
    if version != HEAD:
        older = (
            "the next start of the server migrates it" if version < HEAD else "install a newer one"
        )
        yield f"schema: must be {HEAD} for this version of Zerolab, got {version}; {older}"
        return
    for name in sorted(set(metadata.tables) - tables):
        yield f"schema: must have the table {name}, got none"


def _archive_problems(connection: Connection, home: Home) -> Iterator[str]:
    """Yield problems with missing archives: such experiments cannot start or be forked."""
    if "experiments" not in _tables_of(connection):
        return
    query = text("SELECT id, archive FROM experiments WHERE archive IS NOT NULL ORDER BY id")
    missing = [
        str(number)
        for number, archive in connection.execute(query)
        if not (home.archives / f"{archive}.tar.gz").is_file()
    ]
    if missing:
        shown = ", ".join(missing[:_PROBLEMS])
        yield f"archives: {home.archives} lacks the model directories of experiments {shown}"
