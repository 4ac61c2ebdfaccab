"""Limits and retention of logs, trials still to be created, and the server that holds the lock."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")


def upgrade() -> None:
    """Add the columns and the table; read the retention from the stored configurations."""
    op.add_column("experiments", sa.Column("log_retention_days", sa.Integer(), nullable=True))
    creating = sa.Column("creating", sa.Integer(), nullable=False, server_default="0")
    op.add_column("experiments", creating)
    op.add_column("runs", _count("log_bytes"))
    op.add_column("runs", sa.Column("log_first", sa.BigInteger(), nullable=True))
    op.add_column("runs", _count("log_dropped_lines"))
    op.add_column("runs", _count("log_dropped_bytes"))
    op.create_table(
        "server_lock",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("instance", sa.String(32), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_server_lock")),
    )
    query = sa.text("SELECT id, config FROM experiments WHERE config LIKE '%log_retention_days%'")
    change = sa.text("UPDATE experiments SET log_retention_days = :days WHERE id = :id")
    for row in op.get_bind().execute(query).all():
        days = (json.loads(row.config).get("retention_policy") or {}).get("log_retention_days")
        if isinstance(days, int) and days >= 0:
            op.execute(change.bindparams(id=row.id, days=days))


def downgrade() -> None:
    """Drop them."""
    op.drop_table("server_lock")
    for column in ("log_retention_days", "creating"):
        op.drop_column("experiments", column)
    for column in ("log_bytes", "log_first", "log_dropped_lines", "log_dropped_bytes"):
        op.drop_column("runs", column)
