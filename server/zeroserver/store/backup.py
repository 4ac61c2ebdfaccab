"""Backup, restore and check of a server's database, with the model archives beside it.

A backup is a directory::

    zerolab-20261127-013000/
        zerolab.db         a copy of the SQLite database, or
        database.dump      what pg_dump wrote, in its custom format
        archives/          the submitted model directories: hard links where that is possible

It is written under a temporary name and renamed when it is complete. Checkpoints are not part of
it: they may be terabytes, and are in separate storages.
"""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from zerolab.errors import ConfigError
from zerolab.paths import Home
from zeroserver.errors import StoreError
from zeroserver.store.database import Database
from zeroserver.store.schema import HEAD, metadata

__all__ = ["back_up", "back_up_before_migration", "check", "restore"]

_SQLITE, _POSTGRESQL, _ARCHIVES = "zerolab.db", "database.dump", "archives"
_BEFORE = "before-restore"
_MIGRATIONS_KEPT = 3
"""Backups before migrations that stay; older ones are removed."""
_PROBLEMS = 20


def back_up(database: Database, home: Home, target: Path | None = None, prefix: str = "") -> Path:
    """Write a backup; the server may run and write at the same time.

    Args:
        database: It is only read from.
        home: The installation, for its archives.
        target: Directory to create; one named by the time in ``backups/`` when None.
        prefix: Begins the name of such a directory.

    Returns:
        The directory.

    Raises:
        ConfigError: If the target is there already, or pg_dump is missing or fails.
        StoreError: If the database cannot be read, or the disk is full.
    """
    if target is None:
        name = f"{prefix or 'zerolab'}-{time.strftime('%Y%m%d-%H%M%S')}"
        target = home.backups / name
        target.parent.mkdir(mode=0o700, exist_ok=True)
    if target.exists():
        raise ConfigError("backup", [f"{target}: must not exist yet; name a new directory"])
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise StoreError.of_file(error, target.parent) from error
    try:
        if database.sqlite:
            _copy_sqlite(_file_of(database), partial / _SQLITE)
        else:
            _dump_postgresql(database, partial / _POSTGRESQL)
        _copy_archives(home.archives, partial / _ARCHIVES)
        partial.rename(target)
        _sync(target.parent)
    except OSError as error:
        raise StoreError.of_file(error, target) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def back_up_before_migration(database: Database, home: Home, revision: str) -> Path:
    """Write a backup of a database with an older schema; remove all but the newest of these.

    Raises:
        ConfigError: If pg_dump is missing or fails.
        StoreError: If the database cannot be read, or the disk is full.
    """
    written = back_up(database, home, prefix=f"schema-{revision}")
    older = sorted(home.backups.glob("schema-*"), key=lambda path: path.stat().st_mtime)
    for path in older[:-_MIGRATIONS_KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    return written


def restore(database: Database, home: Home, source: Path) -> Path | None:
    """Replace the database by a backup; the server must not run.

    Args:
        database: It must not be open.
        home: The installation, for its archives.
        source: A directory that :func:`back_up` has written, or a SQLite file.

    Returns:
        Backup of the previous data; None if there was none.

    Raises:
        ConfigError: If the source is no backup, or one of another kind of database.
        ConflictError: If a server works on the database.
        StoreError: If the backup is damaged, or the disk is full.
    """
    content = source
    if source.is_dir():
        content = source / (_SQLITE if database.sqlite else _POSTGRESQL)
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
            _replace_sqlite(content, _file_of(database))
        else:
            before = back_up(database, home, prefix=_BEFORE) if _has_tables(database) else None
            _load_postgresql(database, content)
        if (source / _ARCHIVES).is_dir():
            _copy_archives(source / _ARCHIVES, home.archives)
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


def _file_of(database: Database) -> Path:
    if database.file is None:
        raise ConfigError("database", [f"must be a file or PostgreSQL, got {database.name}"])
    return database.file


def _has_tables(database: Database) -> bool:
    with database.read() as connection:
        return bool(_tables_of(connection))


def _tables_of(connection: Connection) -> set[str]:
    from sqlalchemy import inspect

    return set(inspect(connection).get_table_names())


# -- SQLite ----------------------------------------------------------------------------------


def _copy_sqlite(source: Path, target: Path) -> None:
    """Copy a database that may be in use: one consistent state, in one file."""
    if not source.is_file():
        problem = f"{source}: no such database; name a PostgreSQL database with --database"
        raise ConfigError("backup", [problem])
    target.touch(mode=0o600)
    try:
        with (
            contextlib.closing(_open(source, "ro")) as old,
            contextlib.closing(sqlite3.connect(target)) as new,
        ):
            old.backup(new)
            new.execute("PRAGMA journal_mode=DELETE")  # no second file belongs to it
    except sqlite3.Error as error:
        raise _sqlite_error(source, error) from error
    _sync(target)


def _save_sqlite(database: Database, home: Home) -> Path | None:
    """Back up the database that a restore replaces; a damaged one is copied as it is."""
    file = _file_of(database)
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
    """Replace a database that is not open by a copy of a backup."""
    copy = target.with_name(f".{target.name}.restored")
    copy.unlink(missing_ok=True)
    _copy_sqlite(source, copy)
    if target.exists() and target.stat().st_size:
        with (
            contextlib.suppress(sqlite3.DatabaseError),  # it is damaged, and has been saved
            contextlib.closing(sqlite3.connect(target)) as old,
        ):
            old.execute("PRAGMA journal_mode=DELETE")  # its WAL must not outlive it
    for ending in ("-wal", "-shm"):
        target.with_name(target.name + ending).unlink(missing_ok=True)
    copy.replace(target)
    _sync(target.parent)


def _verify_sqlite(file: Path) -> None:
    """Raise if a file is damaged or not a Zerolab database.

    Raises:
        ConfigError: If it is not a database of Zerolab, or one of a newer version.
        StoreError: If it is damaged.
    """
    problems = _file_problems(file)
    if problems:
        raise StoreError(f"{file}: is damaged: {problems[0]}; use another backup")
    with contextlib.closing(_open(file, "ro")) as connection:
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
    file = _file_of(database)
    if not file.is_file():
        problem = f"{file}: no such database; name a PostgreSQL database with --database"
        raise ConfigError("database", [problem])
    return _file_problems(file)


def _file_problems(file: Path) -> list[str]:
    try:
        with contextlib.closing(_open(file, "ro")) as connection:
            rows = connection.execute(f"PRAGMA integrity_check({_PROBLEMS})").fetchall()
            problems = [f"integrity: {line}" for (line,) in rows if line != "ok"]
            keys = connection.execute("PRAGMA foreign_key_check").fetchmany(_PROBLEMS)
            problems += [f"foreign key: row {row[1]} of {row[0]} names no {row[2]}" for row in keys]
    except sqlite3.DatabaseError as error:
        return [f"integrity: {error}"]
    return problems


def _open(file: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode={mode}", uri=True, timeout=30)


def _sqlite_error(file: Path, error: sqlite3.Error) -> StoreError:
    damaged = type(error) is sqlite3.DatabaseError
    wrapped = StoreError.of_damage(str(error)) if damaged else StoreError.of(str(error))
    return StoreError.of_start(str(file), wrapped)


# -- PostgreSQL ------------------------------------------------------------------------------


def _dump_postgresql(database: Database, target: Path) -> None:
    _run_tool(database, "pg_dump", "--format=custom", "--no-owner", f"--file={target}")
    target.chmod(0o600)
    _sync(target)


def _load_postgresql(database: Database, source: Path) -> None:
    """Replace the tables in one transaction: a failure changes nothing."""
    options = ("--clean", "--if-exists", "--no-owner", "--single-transaction", "--exit-on-error")
    _run_tool(database, "pg_restore", *options, str(source))


def _run_tool(database: Database, tool: str, *arguments: str) -> None:
    """Run one of PostgreSQL's programs; the password is in its environment alone.

    Raises:
        ConfigError: If it is missing or fails.
    """
    program = shutil.which(tool)
    if program is None:
        problem = f"{tool}: must be in PATH, got nothing; install PostgreSQL's client programs"
        raise ConfigError("database", [problem])
    url = database.url.set(drivername="postgresql")
    environment = dict(os.environ)
    if url.password:
        environment["PGPASSWORD"] = str(url.password)
    address = url._replace(password=None).render_as_string(hide_password=False)
    command = [program, *arguments, f"--dbname={address}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ConfigError("database", [f"{tool}: failed: {lines[0] if lines else done.returncode}"])


def _check_postgresql(database: Database) -> list[str]:
    """Read every table to its end."""
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


# -- both ------------------------------------------------------------------------------------


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
    """Return experiments whose model directory is missing: they cannot start or be forked."""
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


def _copy_archives(source: Path, target: Path) -> None:
    """Link or copy the archives that are missing; none is ever changed in place."""
    target.mkdir(mode=0o700, exist_ok=True)
    for file in source.glob("*.tar.gz"):
        copy = target / file.name
        if copy.exists():
            continue
        try:
            os.link(file, copy)
        except OSError:  # another file system
            with contextlib.suppress(FileNotFoundError):  # deleted with its experiment just now
                shutil.copyfile(file, copy)
                _sync(copy)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
