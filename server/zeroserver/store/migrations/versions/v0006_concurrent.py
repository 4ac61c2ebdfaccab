"""Maximum number of concurrent trials in a column, because the scheduler reads it often."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_OPEN = "ended_at IS NULL"  # ended experiments get it when they continue


def upgrade() -> None:
    """Add the column, and read it from the configurations of what has not ended."""
    column = sa.Column("concurrent_trials", sa.Integer(), nullable=False, server_default="0")
    op.add_column("experiments", column)
    query = sa.text(f"SELECT id, config FROM experiments WHERE {_OPEN}")  # noqa: S608 - our words
    change = sa.text("UPDATE experiments SET concurrent_trials = :number WHERE id = :id")
    for row in op.get_bind().execute(query).all():
        searcher = json.loads(row.config).get("searcher", {})
        number = searcher.get("max_concurrent_trials") or 0
        if number and searcher.get("name") != "single":
            op.execute(change.bindparams(id=row.id, number=number))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("experiments", "concurrent_trials")
