"""How Alembic reaches the database: as :mod:`zeroserver.store.migrate` tells it."""

from alembic import context

from zeroserver.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
context.run_migrations()
