"""Requests of users for more slots, and the most that they may request."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0027"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the table and add the column."""
    op.add_column("quotas", sa.Column("request_limit", sa.Integer(), nullable=True))
    op.create_table(
        "quota_requests",
        sa.Column("id", Id, primary_key=True),
        sa.Column("user_id", sa.BigInteger(), nullable=False),
        sa.Column("max_slots", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("decided_at", sa.Double(), nullable=True),
        sa.Column("decided_by", sa.BigInteger(), nullable=True),
        sa.Column("answer", sa.Text(), nullable=False, server_default=""),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_quota_requests_state", "quota_requests", ["state", "user_id"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("quota_requests")
    op.drop_column("quotas", "request_limit")
