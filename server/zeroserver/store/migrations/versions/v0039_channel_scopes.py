"""Notification channels of a user or a project."""

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; channels keep the experiments that they have."""
    for name in ("user_id", "project_id"):
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
        op.add_column("notification_channels", column)


def downgrade() -> None:
    """Drop them."""
    op.drop_column("notification_channels", "project_id")
    op.drop_column("notification_channels", "user_id")
