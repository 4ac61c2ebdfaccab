"""The host that a log line was written on."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; older lines have no host."""
    op.add_column("logs", sa.Column("host", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("logs", "host")
