"""A run may hold slots of several agents: one row for each, with what it has told."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table, and how many machines a trial may take."""
    number = sa.Column("max_nodes", sa.Integer(), nullable=False, server_default="1")
    op.add_column("experiments", number)
    op.create_table(
        "run_nodes",
        sa.Column("run_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("node_rank", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("agent_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("slot_ids", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("next_log", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("told", sa.Integer(), nullable=False),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Drop both."""
    op.drop_table("run_nodes")
    op.drop_column("experiments", "max_nodes")
