"""Remaining work of deletions and retention; an index of runs by experiment."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_COLUMNS = ("deleting", "retention_due")


def upgrade() -> None:
    """Add the columns and the index."""
    for name in _COLUMNS:
        column = sa.Column(name, sa.Integer(), nullable=False, server_default="0")
        op.add_column("experiments", column)
    op.create_index("ix_runs_experiment", "runs", ["experiment_id"])


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_runs_experiment", "runs")
    for name in _COLUMNS:
        op.drop_column("experiments", name)
