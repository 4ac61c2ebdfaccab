"""Searched hyperparameters that the code of an experiment never read."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; NULL means unknown."""
    op.add_column("experiments", sa.Column("unread_hparams", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("experiments", "unread_hparams")
