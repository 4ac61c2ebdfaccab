"""Share links and saved views."""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create their tables."""
    op.create_table(
        "shares",
        sa.Column("id", _ID, nullable=False),
        sa.Column("owner_id", _ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("experiment_ids", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name="fk_shares_owner_id"),
        sa.PrimaryKeyConstraint("id", name="pk_shares"),
        sa.UniqueConstraint("digest", name="uq_shares_digest"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_shares_owner", "shares", ["owner_id"])
    op.create_table(
        "views",
        sa.Column("id", _ID, nullable=False),
        sa.Column("owner_id", _ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("shared", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name="fk_views_owner_id"),
        sa.PrimaryKeyConstraint("id", name="pk_views"),
        sa.UniqueConstraint("owner_id", "name", name="uq_views_name"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("views")
    op.drop_table("shares")
