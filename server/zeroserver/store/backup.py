"""Backup of a server's database, with the model archives beside it.

A backup is a directory::

    zerolab-20261127-013000/
        zerolab.db         copy of the SQLite database, or
        database.dump      output of pg_dump in its custom format
        archives/          archives of model directories, hard-linked if possible

It is written under a temporary name and renamed when complete. Checkpoints are not included, since
they may be terabytes and are in separate storages.
"""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from pathlib import Path

from zerolab.errors import ConfigError
from zerolab.paths import Home
from zeroserver.errors import StoreError
from zeroserver.store.database import Database

__all__ = [
    "ARCHIVES",
    "POSTGRESQL",
    "SQLITE",
    "back_up",
    "back_up_before_migration",
    "copy_archives",
    "copy_sqlite",
    "file_of",
    "open_sqlite",
    "run_tool",
    "sync_path",
]

SQLITE, POSTGRESQL, ARCHIVES = "zerolab.db", "database.dump", "archives"
_MIGRATIONS_KEPT = 3
"""Number of backups before migrations to keep; older ones are removed."""


def back_up(database: Database, home: Home, target: Path | None = None, prefix: str = "") -> Path:
    """Write a backup, even while the server runs and writes.

    Args:
        database: Database to read.
        home: Home directory of the installation, with its archives.
        target: Directory to create; None for a new one in ``backups/``, named by the time.
        prefix: Start of the name of that new directory.

    Returns:
        The directory.

    Raises:
        ConfigError: If the target already exists, or pg_dump is missing or fails.
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
            copy_sqlite(file_of(database), partial / SQLITE)
        else:
            _dump_postgresql(database, partial / POSTGRESQL)
        copy_archives(home.archives, partial / ARCHIVES)
        partial.rename(target)
        sync_path(target.parent)
    except OSError as error:
        raise StoreError.of_file(error, target) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def back_up_before_migration(database: Database, home: Home, revision: str) -> Path:
    """Write a backup before a migration; prune old backups of this kind.

    Raises:
        ConfigError: If pg_dump is missing or fails.
        StoreError: If the database cannot be read, or the disk is full.
    """
    backup = back_up(database, home, prefix=f"schema-{revision}")
    older = sorted(home.backups.glob("schema-*"), key=lambda path: path.stat().st_mtime)
    for path in older[:-_MIGRATIONS_KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    return backup


def file_of(database: Database) -> Path:
    """Return the file of a SQLite database.

    Raises:
        ConfigError: If it is not a file.
    """
    if database.file is None:
        raise ConfigError("database", [f"must be a file or PostgreSQL, got {database.name}"])
    return database.file


def copy_sqlite(source: Path, target: Path) -> None:
    """Copy a database that may be in use, as a consistent snapshot in one file."""
    if not source.is_file():
        problem = f"{source}: no such database; name a PostgreSQL database with --database"
        raise ConfigError("backup", [problem])
    target.touch(mode=0o600)
    try:
        with (
            contextlib.closing(open_sqlite(source, "ro")) as old,
            contextlib.closing(sqlite3.connect(target)) as new,
        ):
            old.backup(new)
            new.execute("PRAGMA journal_mode=DELETE")  # so that it has no WAL file
    except sqlite3.Error as error:
        raise sqlite_error(source, error) from error
    sync_path(target)


def open_sqlite(file: Path, mode: str) -> sqlite3.Connection:
    """Open a SQLite file in a mode such as ``ro`` (read-only)."""
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode={mode}", uri=True, timeout=30)


def sqlite_error(file: Path, error: sqlite3.Error) -> StoreError:
    damaged = type(error) is sqlite3.DatabaseError
    wrapped = StoreError.of_damage(str(error)) if damaged else StoreError.of(str(error))
    return StoreError.of_start(str(file), wrapped)


def _dump_postgresql(database: Database, target: Path) -> None:
    run_tool(database, "pg_dump", "--format=custom", "--no-owner", f"--file={target}")
    target.chmod(0o600)
    sync_path(target)


def run_tool(database: Database, tool: str, *arguments: str) -> None:
    """Run a PostgreSQL client program; the password is passed only in its environment.

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
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        raise ConfigError(
            "database", [f"{tool}: failed: {lines[0] if lines else result.returncode}"]
        )


def copy_archives(source: Path, target: Path) -> None:
    """Link or copy missing archives; they can be linked because they never change."""
    target.mkdir(mode=0o700, exist_ok=True)
    for file in source.glob("*.tar.gz"):
        copy = target / file.name
        if copy.exists():
            continue
        try:
            os.link(file, copy)
        except OSError:  # another file system
            with contextlib.suppress(FileNotFoundError):  # its experiment was deleted concurrently
                shutil.copyfile(file, copy)
                sync_path(copy)


def sync_path(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
