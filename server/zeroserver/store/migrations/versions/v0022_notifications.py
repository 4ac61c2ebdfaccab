"""Channels of notifications, and the outbox of their messages."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add both tables."""
    op.create_table(
        "notification_channels",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("events", sa.Text(), nullable=False),
        sa.Column("all_experiments", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_notification_channels"),
        sa.UniqueConstraint("name", name="uq_notification_channels_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "notifications",
        sa.Column("id", _ID, nullable=False),
        sa.Column("channel_id", sa.BigInteger(), nullable=False),
        sa.Column("event_key", sa.Text(), nullable=False),
        sa.Column("event", sa.String(16), nullable=False),
        sa.Column("experiment_id", sa.BigInteger(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_notifications"),
        sa.UniqueConstraint("channel_id", "event_key", name="uq_notifications_event"),
        sqlite_autoincrement=True,
    )
    for name, columns in _INDEXES.items():
        op.create_index(name, "notifications", columns)


_INDEXES = {
    "ix_notifications_due": ["state", "due_at"],
    "ix_notifications_channel": ["channel_id", "state", "id"],
    "ix_notifications_experiment": ["experiment_id", "id"],
}


def downgrade() -> None:
    """Drop both."""
    op.drop_table("notifications")
    op.drop_table("notification_channels")
