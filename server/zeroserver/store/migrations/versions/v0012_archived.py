"""Trials that were put away."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    column = sa.Column("archived", sa.Integer(), nullable=False, server_default="0")
    op.add_column("trials", column)


def downgrade() -> None:
    """Drop them."""
    op.drop_column("trials", "archived")
