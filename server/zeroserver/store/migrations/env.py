"""Alembic's environment, configured by :mod:`zeroserver.store.migrate`."""

from alembic import context

from zeroserver.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
context.run_migrations()
