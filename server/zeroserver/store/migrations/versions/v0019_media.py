"""The index of media; their content is in the checkpoint storage."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "media",
        sa.Column("trial_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("suffix", sa.String(40), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("trial_id", "name", "step", "position", name="pk_media"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_media_digest", "media", ["trial_id", "digest", "size"])


def downgrade() -> None:
    """Drop it."""
    op.drop_table("media")
