"""Comments on experiments."""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create their table."""
    op.create_table(
        "comments",
        sa.Column("id", _ID, nullable=False),
        sa.Column("experiment_id", _ID, nullable=False),
        sa.Column("owner_id", _ID, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("edited_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name="fk_comments_experiment_id"
        ),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name="fk_comments_owner_id"),
        sa.PrimaryKeyConstraint("id", name="pk_comments"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_comments_experiment", "comments", ["experiment_id", "id"])


def downgrade() -> None:
    """Drop it."""
    op.drop_table("comments")
