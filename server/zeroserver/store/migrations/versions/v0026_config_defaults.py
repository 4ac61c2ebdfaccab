"""Defaults and limits of experiments."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create their table."""
    op.create_table(
        "config_defaults",
        sa.Column("scope", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("scope", name=op.f("pk_config_defaults")),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("config_defaults")
