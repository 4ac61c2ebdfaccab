"""Bring a database to the newest schema before anything else touches it."""

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, text
from sqlalchemy.exc import DBAPIError

from zerolab.errors import ConfigError, ConflictError
from zeroserver.store.database import Database
from zeroserver.store.schema import HEAD, metadata

__all__ = ["migrate", "upgrade"]

_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""Where Alembic keeps the revision."""


def migrate(database: Database) -> None:
    """Create the tables, or bring older ones up to date, in one transaction.

    Raises:
        ConflictError: If a newer version of the server has written this database.
        ConfigError: If the database cannot be opened.
    """
    try:
        with database.writer_engine.begin() as connection:
            found = _revision(connection)
            if found is None:
                _create(connection)
            elif found != HEAD:
                upgrade(connection)
    except DBAPIError as error:
        where = database.url.render_as_string(hide_password=True)
        raise ConfigError(f"database {where}", [f"cannot be opened: {error.orig}"]) from error


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


def _create(connection: Connection) -> None:
    """Make all tables at once; a test holds them against those of the migrations."""
    metadata.create_all(connection)
    _VERSION.metadata.create_all(connection)
    connection.execute(_VERSION.insert().values(version_num=HEAD))


def upgrade(connection: Connection) -> None:
    """Run the migrations that a database has not seen.

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
