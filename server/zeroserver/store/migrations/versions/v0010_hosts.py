"""Slots of machines that no agent offers, which experiments with a hostfile take."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    column = sa.Column("host_slots", sa.Text(), nullable=False, server_default="[]")
    op.add_column("experiments", column)


def downgrade() -> None:
    """Drop them."""
    op.drop_column("experiments", "host_slots")
