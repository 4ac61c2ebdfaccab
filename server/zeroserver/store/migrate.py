"""Migration of a database to the newest schema at startup."""

import logging
import time
from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, text
from sqlalchemy.exc import DBAPIError

from zerolab.contract.names import DEFAULT_PROJECT
from zerolab.errors import ConfigError, ConflictError, ZerolabError
from zerolab.paths import Home
from zeroserver.errors import StoreError
from zeroserver.store.database import Database
from zeroserver.store.schema import HEAD, logs, metadata, points, projects, rollups, users

__all__ = ["lock_database", "migrate", "upgrade"]

logger = logging.getLogger(__name__)

_OF_RUNS = (points, rollups, logs)
"""Tables of data reported by runs; if they are damaged, the rest is still usable."""

_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""Alembic's table of the revision."""


def lock_database(database: Database) -> None:
    """Lock a database for this server before it is migrated.

    Raises:
        ConflictError: If another server uses it.
        ConfigError: If the database cannot be opened.
        StoreError: If it is damaged, or its disk is full.
    """
    try:
        database.lock.acquire()
    except DBAPIError as error:
        raise _unopened(database, error) from error
    except OSError as error:
        raise ConfigError(f"database {database.name}", [f"cannot be opened: {error}"]) from error


def migrate(database: Database, home: Home | None = None) -> None:
    """Create or upgrade the tables in one transaction.

    Args:
        database: Locked database.
        home: Home directory for a backup before an upgrade; None for no backup.

    Raises:
        ConflictError: If a newer version of the server, or another program, created it.
        ConfigError: If the database cannot be opened.
        StoreError: If it is damaged, or its disk is full.
    """
    try:
        if home is not None:
            _back_up(database, home)
        with database.writer_engine.begin() as connection:
            revision = _revision(connection)
            if revision is None:
                _refuse_strangers(connection)
                _create(connection)
                return
            if revision != HEAD:
                upgrade(connection)
            _check_columns(connection)
    except DBAPIError as error:
        raise _unopened(database, error) from error


def _back_up(database: Database, home: Home) -> None:
    """Write a backup if the schema is older than this version's.

    Raises:
        StoreError: If the backup cannot be written.
    """
    with database.writer_engine.begin() as connection:
        revision = _revision(connection)
    if revision is None or revision >= HEAD:
        return
    from zeroserver.store.backup import back_up_before_migration

    try:
        backup = back_up_before_migration(database, home, revision)
    except ConfigError as error:  # pg_dump is missing; PostgreSQL is backed up by other means
        logger.warning("no backup before the migration from schema %s: %s", revision, error)
    except StoreError as error:
        msg = f"no backup before the migration from schema {revision}: {error}"
        raise StoreError.of_start(database.name, error) from StoreError(msg)
    else:
        logger.info("backup before the migration from schema %s: %s", revision, backup)


def _unopened(database: Database, error: DBAPIError) -> ZerolabError:
    translated = database.translate(error)
    if isinstance(translated, StoreError) and (translated.damaged or translated.disk_full):
        return translated
    return ConfigError(f"database {database.name}", [f"cannot be opened: {error.orig}"])


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def _refuse_strangers(connection: Connection) -> None:
    """Refuse a database that another program created.

    Raises:
        ConflictError: If it has tables with our names, but no revision.
    """
    existing = sorted(set(inspect(connection).get_table_names()) & set(metadata.tables))
    if existing:
        msg = (
            f"the database holds tables of another program ({', '.join(existing)}): "
            "name an empty one with --database, or another data directory with --home"
        )
        raise ConflictError(msg)


def _check_columns(connection: Connection) -> None:
    """Check that the tables have our columns, since other programs use Alembic as well.

    Raises:
        ConflictError: If a column is missing.
    """
    columns = _columns(connection)
    for table in metadata.tables.values():
        missing = sorted({column.name for column in table.c} - columns.get(table.name, set()))
        if missing:
            msg = (
                f"the database is not one of Zerolab's, or is damaged: its table {table.name} has "
                f"no column {', '.join(missing)}; name another one with --database"
            )
            raise ConflictError(msg)
        if connection.dialect.name == "sqlite" and table not in _OF_RUNS:
            # Read a row now, since each query would fail otherwise.
            connection.execute(text(f"SELECT 1 FROM {table.name} NOT INDEXED LIMIT 1"))  # noqa: S608 - our own names


def _columns(connection: Connection) -> dict[str, set[str]]:
    """Return the existing columns of this project's tables, by table."""
    columns_by_table: dict[str, set[str]] = {}
    if connection.dialect.name == "sqlite":  # one query instead of thirty saves 10 ms at startup
        query = text(
            "SELECT m.name, c.name FROM sqlite_master m JOIN pragma_table_info(m.name) c "
            "WHERE m.type = 'table'"
        )
        for table, column in connection.execute(query):
            columns_by_table.setdefault(table, set()).add(column)
        return columns_by_table
    inspected = inspect(connection).get_multi_columns(filter_names=list(metadata.tables))
    for (_, table), columns in inspected.items():
        columns_by_table[table] = {column["name"] for column in columns}
    return columns_by_table


def _create(connection: Connection) -> None:
    """Create all tables without migrations; a test checks that the results are equal."""
    metadata.create_all(connection, checkfirst=False)  # no table exists
    _VERSION.metadata.create_all(connection)
    connection.execute(_VERSION.insert().values(version_num=HEAD))
    admin = {"name": "admin", "role": "admin", "created_at": time.time()}
    connection.execute(users.insert().values(admin))
    default = {"name": DEFAULT_PROJECT, "created_at": time.time()}
    connection.execute(projects.insert().values(default))


def upgrade(connection: Connection) -> None:
    """Run the pending migrations of a database.

    Raises:
        ConflictError: If a newer version of the server created the schema.
    """
    # Imported here, since Alembic takes 0.15 s to load, and most starts do not need it.
    from alembic import command
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        msg = (
            f"the database has schema {_revision(connection)}, which this version of Zerolab does "
            f"not know ({HEAD} is its newest): install the version that wrote it, or a newer one"
        )
        raise ConflictError(msg) from error
