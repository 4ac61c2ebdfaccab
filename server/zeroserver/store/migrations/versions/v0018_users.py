"""Users and their tokens; the owners of experiments and models."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_OWNED = ("experiments", "models")


def upgrade() -> None:
    """Create the first user, an administrator, to whom everything belongs."""
    users = op.create_table(
        "users",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("active", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("name", name=op.f("uq_users_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "tokens",
        sa.Column("id", _ID, nullable=False),
        sa.Column("user_id", _ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_tokens_user_id")),
        sa.UniqueConstraint("digest", name=op.f("uq_tokens_digest")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tokens_user", "tokens", ["user_id"])
    # Without an id, so that PostgreSQL's sequence continues with 2.
    op.bulk_insert(users, [{"name": "admin", "role": "admin", "created_at": time.time()}])
    for table in _OWNED:
        owner = sa.Column("owner_id", sa.BigInteger(), nullable=False, server_default="1")
        op.add_column(table, owner)


def downgrade() -> None:
    """Drop them."""
    for table in _OWNED:
        op.drop_column(table, "owner_id")
    op.drop_table("tokens")
    op.drop_table("users")
