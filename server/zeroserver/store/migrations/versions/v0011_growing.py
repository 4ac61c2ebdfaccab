"""Runs that were asked to leave so that their trials have more slots."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    op.add_column("runs", sa.Column("grows_to", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Drop them."""
    op.drop_column("runs", "grows_to")
