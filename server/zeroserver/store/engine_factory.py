"""Creation of SQLAlchemy engines: addresses, connection pools and connection settings."""

import os
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from zerolab.contract.spec import ENV_DATABASE
from zerolab.errors import ConfigError

__all__ = ["check_url", "has_password", "open_engine", "sqlite_url", "take_database", "with_driver"]

_BUSY_TIMEOUT_S = 5
"""Timeout for a lock held by another process; callers may retry."""
_POOL_TIMEOUT_S = 5
"""Timeout for a connection of the pool."""


def sqlite_url(path: Path) -> str:
    """Return the URL of a SQLite file."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def with_driver(url: URL) -> URL:
    """Set this project's driver and move a password from the query into its field.

    There it is hidden wherever the URL is shown.
    """
    if url.get_backend_name() != "postgresql":
        return url
    password = url.query.get("password")
    if isinstance(password, str):
        url = url.set(password=password).difference_update_query(["password"])
    return url.set(drivername="postgresql+psycopg")


def take_database(location: str) -> str:
    """Return the database URL from an option or the environment; empty for SQLite.

    The variable is removed, so that no child process inherits it.

    Args:
        location: Value of the option; empty if it was not given.
    """
    of_environment = os.environ.pop(ENV_DATABASE, "")
    return location or of_environment


def has_password(url: str) -> bool:
    """Check whether a database URL contains a password."""
    try:
        return bool(url) and with_driver(make_url(url)).password is not None
    except (ArgumentError, ValueError):
        return False


def check_url(url: str) -> None:
    """Validate a database URL; errors never show its password.

    Raises:
        ConfigError: If it is invalid.
    """
    try:
        valid = not url or make_url(url).get_backend_name() in {"postgresql", "sqlite"}
    except (ArgumentError, NoSuchModuleError, ValueError):
        valid = False
    if not valid:
        form = "must be postgresql://USER@HOST/NAME or sqlite:///FILE"
        raise ConfigError("server", [f"--database or {ENV_DATABASE}: {form}"])


def open_engine(url: URL, begin: str, size: int, synchronous: str, overflow: int = 32) -> Engine:
    """Create an engine with a pool of connections that are opened on first use.

    Args:
        url: URL with a driver.
        begin: SQL statement that begins a transaction in SQLite.
        size: Number of connections that stay open.
        synchronous: SQLite's ``synchronous`` setting, ``full`` or ``normal``.
        overflow: Maximum number of additional connections under load.
    """
    pool = {"pool_size": size, "max_overflow": overflow, "pool_timeout": _POOL_TIMEOUT_S}
    if url.get_backend_name() != "sqlite":
        engine = create_engine(
            url, pool_pre_ping=True, connect_args={"connect_timeout": _BUSY_TIMEOUT_S}, **pool
        )

        @event.listens_for(engine, "connect")
        def _limit_waits(connection: Any, _record: Any) -> None:
            try:
                with connection.cursor() as cursor:
                    cursor.execute(f"SET lock_timeout = '{_BUSY_TIMEOUT_S}s'")
                connection.commit()
            except BaseException:
                connection.close()  # the pool does not know it yet
                raise

        return engine
    connect = {"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False}
    engine = create_engine(url, connect_args=connect, **pool)

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        # Disable the driver's own transactions: they begin too late, and never for reads.
        connection.isolation_level = None
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={synchronous.upper()}",
            "foreign_keys=ON",
            "temp_store=MEMORY",
            "secure_delete=ON",  # deleted rows may contain credentials
            "cache_size=-65536",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        if not driver.in_transaction:  # the writer begins its own
            connection.exec_driver_sql(begin)

    return engine
