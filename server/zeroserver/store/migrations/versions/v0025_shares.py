"""Weights of users in fair share."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("users", sa.Column("weight", sa.Double(), nullable=False, server_default="1"))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("users", "weight")
