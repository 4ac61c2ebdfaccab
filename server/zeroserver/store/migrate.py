"""Migration of a database to the newest schema at start."""

import logging
from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, text
from sqlalchemy.exc import DBAPIError

from zerolab.errors import ConfigError, ConflictError, ZerolabError
from zerolab.paths import Home
from zeroserver.errors import StoreError
from zeroserver.store.database import Database
from zeroserver.store.schema import HEAD, logs, metadata, points, rollups

__all__ = ["lock_database", "migrate", "upgrade"]

logger = logging.getLogger(__name__)

_OF_RUNS = (points, rollups, logs)
"""Data that runs have reported; if it is damaged, the rest is still usable."""

_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""Where Alembic keeps the revision."""


def lock_database(database: Database) -> None:
    """Lock a database for this server before it is migrated.

    Raises:
        ConflictError: If another server works on it.
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
    """Create the tables, or bring older ones up to date, in one transaction.

    Args:
        database: Locked database.
        home: Folder of the backup before older tables change; None for no backup.

    Raises:
        ConflictError: If a newer version of the server, or another program, has written it.
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
    """Write a backup if the tables are older than this version.

    Raises:
        StoreError: If it cannot be written.
    """
    with database.writer_engine.begin() as connection:
        revision = _revision(connection)
    if revision is None or revision >= HEAD:
        return
    from zeroserver.store.backup import back_up_before_migration

    try:
        written = back_up_before_migration(database, home, revision)
    except ConfigError as error:  # no pg_dump: PostgreSQL has other backups
        logger.warning("no backup before the migration from schema %s: %s", revision, error)
    except StoreError as error:
        msg = f"no backup before the migration from schema {revision}: {error}"
        raise StoreError.of_start(database.name, error) from StoreError(msg)
    else:
        logger.info("backup before the migration from schema %s: %s", revision, written)


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
    """Raise if another program created the database.

    Raises:
        ConflictError: If there are tables with names of ours, and nothing says that they are ours.
    """
    existing = sorted(set(inspect(connection).get_table_names()) & set(metadata.tables))
    if existing:
        msg = (
            f"the database holds tables of another program ({', '.join(existing)}): "
            "name an empty one with --database, or another data directory with --home"
        )
        raise ConflictError(msg)


def _check_columns(connection: Connection) -> None:
    """See that the tables are ours, whatever number another program has given to its own.

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
    if connection.dialect.name == "sqlite":  # one query instead of thirty saves 10 ms at the start
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
    """Create all tables at once; a test compares them with those of the migrations."""
    metadata.create_all(connection, checkfirst=False)  # none of them exists
    _VERSION.metadata.create_all(connection)
    connection.execute(_VERSION.insert().values(version_num=HEAD))


def upgrade(connection: Connection) -> None:
    """Run the pending migrations of a database.

    Raises:
        ConflictError: If a newer version of the server has written this database.
    """
    # Alembic takes 0.15 s to load; a server whose tables are up to date starts without it.
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
