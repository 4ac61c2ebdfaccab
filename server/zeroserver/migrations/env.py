"""How Alembic reaches the database: through the connection that :mod:`zeroserver.migrate` gives."""

from alembic import context

from zeroserver.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
context.run_migrations()
