"""Ids of external runs in a column with an index."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column and read the ids from the submitted configurations."""
    op.add_column("experiments", sa.Column("external_id", sa.String(128), nullable=True))
    experiments = sa.table(
        "experiments", sa.column("id"), sa.column("raw_config"), sa.column("external_id"),
        sa.column("forked_from"),
    )  # fmt: skip
    connection = op.get_bind()
    rows = connection.execute(
        sa.select(experiments.c.id, experiments.c.raw_config).where(
            experiments.c.raw_config.contains('"external_run"'),
            experiments.c.forked_from.is_(None),
        )
    ).all()
    for number, raw_config in rows:
        data = json.loads(raw_config).get("data")
        if isinstance(data, dict) and isinstance(data.get("external_run"), str):
            statement = sa.update(experiments).where(experiments.c.id == number)
            connection.execute(statement.values(external_id=data["external_run"][:128]))
    op.create_index("ix_experiments_external", "experiments", ["external_id"])


def downgrade() -> None:
    """Drop it."""
    op.drop_index("ix_experiments_external", "experiments")
    op.drop_column("experiments", "external_id")
