"""Directories to remove are marked in a separate table until they are removed."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table; checkpoints that were deleted may still have files."""
    op.create_table(
        "discarded",
        sa.Column("path", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("path", name=op.f("pk_discarded")),
    )
    op.execute(
        "INSERT INTO discarded (path) SELECT DISTINCT path FROM checkpoints WHERE state = 'DELETED'"
    )


def downgrade() -> None:
    """Drop the table of pending removals."""
    op.drop_table("discarded")
