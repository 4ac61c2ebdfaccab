"""The registry: models by name, and the checkpoints that are their versions."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add both tables."""
    op.create_table(
        "models",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("last_version", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_models"),
        sa.UniqueConstraint("name", name="uq_models_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "model_versions",
        sa.Column("model_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("checkpoint", sa.String(36), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "version", name="pk_model_versions"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_model_versions_checkpoint", "model_versions", ["checkpoint"])


def downgrade() -> None:
    """Drop both."""
    op.drop_table("model_versions")
    op.drop_table("models")
