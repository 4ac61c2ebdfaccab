"""Hashed passwords of users."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("users", sa.Column("password", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("users", "password")
