"""Trials begin with the weights of others, and may be paused alone."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the columns."""
    op.add_column("experiments", sa.Column("source_checkpoint", sa.String(36), nullable=True))
    op.add_column("trials", sa.Column("source_trial_id", _ID, nullable=True))
    op.add_column("trials", sa.Column("source_steps", sa.BigInteger(), nullable=True))
    op.add_column("trials", sa.Column("source_checkpoint", sa.String(36), nullable=True))
    held_column = sa.Column("held", sa.Integer(), nullable=False, server_default="0")
    op.add_column("trials", held_column)


def downgrade() -> None:
    """Drop them."""
    for name in ("held", "source_checkpoint", "source_steps", "source_trial_id"):
        op.drop_column("trials", name)
    op.drop_column("experiments", "source_checkpoint")
