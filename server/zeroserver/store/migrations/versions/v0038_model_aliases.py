"""Aliases of model versions."""

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table; versions have no aliases yet."""
    op.create_table(
        "model_aliases",
        sa.Column("model_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("alias", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "alias", name="pk_model_aliases"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("model_aliases")
