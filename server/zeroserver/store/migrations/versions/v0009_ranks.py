"""Scheduler input for ranks with several slots and for elastic trials."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    columns: list[sa.Column[int] | sa.Column[str]] = [
        sa.Column("slots_per_rank", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("fewer_slots", sa.Text(), nullable=False, server_default="[]"),
    ]
    for column in columns:
        op.add_column("experiments", column)


def downgrade() -> None:
    """Drop them."""
    for name in ("slots_per_rank", "fewer_slots"):
        op.drop_column("experiments", name)
