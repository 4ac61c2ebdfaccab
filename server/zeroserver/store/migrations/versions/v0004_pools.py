"""Pools, quotas and places in the queue; agents that can be disabled, slot by slot."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_WAITING = sa.text(
    "state = 'QUEUED' AND run_id IS NULL "
    "AND (source_trial_id IS NULL OR source_checkpoint IS NOT NULL)"
)
_WEIGHTS_MISSING = sa.text("source_trial_id IS NOT NULL AND source_checkpoint IS NULL")


def upgrade() -> None:
    """Everything so far is in the default pool, in the order in which it came."""
    for column in (
        sa.Column("pool", sa.Text(), nullable=False, server_default="default"),
        sa.Column("position", sa.Double(), nullable=False, server_default="0"),
        sa.Column("queue_time", sa.Integer(), nullable=True),
        sa.Column("waits_since", sa.Double(), nullable=True),
    ):
        op.add_column("experiments", column)
    op.execute("UPDATE experiments SET position = id")
    for column in (
        sa.Column("pool", sa.Text(), nullable=False, server_default="default"),
        sa.Column("identity", sa.Text(), nullable=False, server_default=""),
        sa.Column("enabled", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("leaving", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("disabled_slots", sa.Text(), nullable=False, server_default="[]"),
    ):
        op.add_column("agents", column)
    op.create_table(
        "pools",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("policy", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_pools")),
    )
    op.create_table(
        "quotas",
        sa.Column("group_name", sa.Text(), nullable=False),
        sa.Column("max_slots", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("group_name", name=op.f("pk_quotas")),
    )
    op.create_index("ix_experiments_place", "experiments", ["pool", "position"])
    op.create_index("ix_trials_restart", "trials", ["restart_at"])
    op.create_index(
        "ix_trials_waiting",
        "trials",
        [
            *("experiment_id", "excluded", "restart_at", "id"),
            *("state", "run_id", "source_trial_id", "source_checkpoint"),
        ],
        sqlite_where=_WAITING,
        postgresql_where=_WAITING,
    )
    op.create_index(
        "ix_trials_source",
        "trials",
        ["source_trial_id"],
        sqlite_where=_WEIGHTS_MISSING,
        postgresql_where=_WEIGHTS_MISSING,
    )


def downgrade() -> None:
    """Forget all of it."""
    for name, table in (
        ("ix_trials_source", "trials"),
        ("ix_trials_waiting", "trials"),
        ("ix_trials_restart", "trials"),
        ("ix_experiments_place", "experiments"),
    ):
        op.drop_index(name, table)
    op.drop_table("quotas")
    op.drop_table("pools")
    for column in ("disabled_slots", "leaving", "enabled", "identity", "pool"):
        op.drop_column("agents", column)
    for column in ("waits_since", "queue_time", "position", "pool"):
        op.drop_column("experiments", column)
