"""Retention of metrics."""

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; existing experiments keep all metrics."""
    op.add_column("experiments", sa.Column("metric_retention_days", sa.Integer(), nullable=True))
    op.add_column("experiments", sa.Column("metrics_expired_at", sa.Double(), nullable=True))


def downgrade() -> None:
    """Drop both."""
    op.drop_column("experiments", "metrics_expired_at")
    op.drop_column("experiments", "metric_retention_days")
