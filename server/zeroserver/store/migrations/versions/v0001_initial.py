"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make all tables."""
    op.create_table(
        "agents",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("slots", sa.Text(), nullable=False),
        sa.Column("alive", sa.Integer(), nullable=False),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_agents")),
        sa.UniqueConstraint("name", name=op.f("uq_agents_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "experiments",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=24), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("raw_config", sa.Text(), nullable=False),
        sa.Column("archive", sa.String(length=64), nullable=True),
        sa.Column("archived", sa.Integer(), nullable=False),
        sa.Column("test_mode", sa.Integer(), nullable=False),
        sa.Column(
            "forked_from", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True
        ),
        sa.Column("searcher_name", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("smaller_is_better", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("max_slots", sa.Integer(), nullable=True),
        sa.Column("searcher_done", sa.Integer(), nullable=False),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("num_trials", sa.Integer(), nullable=False),
        sa.Column(
            "best_trial_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True
        ),
        sa.Column("best_validation", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiments")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_experiments_state", "experiments", ["state", "id"], unique=False)
    op.create_table(
        "logs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("experiment_id", sa.BigInteger(), nullable=False),
        sa.Column("trial_id", sa.BigInteger(), nullable=True),
        sa.Column("run_id", sa.BigInteger(), nullable=True),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("stream", sa.String(length=8), nullable=False),
        sa.Column("level", sa.String(length=16), nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_logs")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_logs_experiment", "logs", ["experiment_id", "id"], unique=False)
    op.create_index("ix_logs_trial", "logs", ["trial_id", "id"], unique=False)
    op.create_table(
        "metric_keys",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("group_name", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_metric_keys")),
        sa.UniqueConstraint("group_name", "name", name=op.f("uq_metric_keys_group_name")),
    )
    op.create_table(
        "points",
        sa.Column("trial_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("trial_id", "key_id", "step", name=op.f("pk_points")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "rollups",
        sa.Column("trial_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("shift", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("key_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("bucket", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("least", sa.Double(), nullable=True),
        sa.Column("most", sa.Double(), nullable=True),
        sa.Column("total", sa.Double(), nullable=False),
        sa.Column("finite", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("trial_id", "shift", "key_id", "bucket", name=op.f("pk_rollups")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "searcher_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column(
            "experiment_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("kind", sa.String(length=24), nullable=False),
        sa.Column("request_id", sa.Integer(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("length", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_searcher_events_experiment_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_searcher_events")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_searcher_events_experiment", "searcher_events", ["experiment_id", "id"], unique=False
    )
    op.create_table(
        "trials",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column(
            "experiment_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("request_id", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("hparams", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("until", sa.BigInteger(), nullable=True),
        sa.Column("waits", sa.Integer(), nullable=False),
        sa.Column("stop", sa.String(length=16), nullable=True),
        sa.Column("restart_at", sa.Double(), nullable=True),
        sa.Column("steps_completed", sa.BigInteger(), nullable=False),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("searcher_steps", sa.BigInteger(), nullable=False),
        sa.Column("best_validation", sa.Double(), nullable=True),
        sa.Column("best_steps", sa.BigInteger(), nullable=True),
        sa.Column("latest_validation", sa.Double(), nullable=True),
        sa.Column("latest_checkpoint", sa.String(length=36), nullable=True),
        sa.Column("best_checkpoint", sa.String(length=36), nullable=True),
        sa.Column("activity", sa.Text(), nullable=True),
        sa.Column("excluded", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_trials_experiment_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trials")),
        sa.UniqueConstraint("experiment_id", "request_id", name=op.f("uq_trials_experiment_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_trials_best", "trials", ["experiment_id", "best_validation", "id"], unique=False
    )
    op.create_index("ix_trials_experiment", "trials", ["experiment_id", "id"], unique=False)
    op.create_index("ix_trials_state", "trials", ["state", "experiment_id"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("uuid", sa.String(length=36), nullable=False),
        sa.Column("trial_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column(
            "experiment_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("run_id", sa.BigInteger(), nullable=True),
        sa.Column("steps_completed", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("resources", sa.Text(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_checkpoints_experiment_id")
        ),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_checkpoints_trial_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("uuid", name=op.f("uq_checkpoints_uuid")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_checkpoints_experiment", "checkpoints", ["experiment_id", "id"], unique=False
    )
    op.create_index(
        "ix_checkpoints_trial", "checkpoints", ["trial_id", "steps_completed"], unique=False
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("trial_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column(
            "experiment_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("agent_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("slot_ids", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("directive", sa.String(length=8), nullable=False),
        sa.Column("deadline_at", sa.Double(), nullable=True),
        sa.Column("killed", sa.Integer(), nullable=False),
        sa.Column("killed_at", sa.Double(), nullable=True),
        sa.Column("no_retry", sa.Integer(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.Column("next_log", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["agent_id"], ["agents.id"], name=op.f("fk_runs_agent_id")),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_runs_experiment_id")
        ),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_runs_trial_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_runs_state", "runs", ["state", "agent_id"], unique=False)
    op.create_index("ix_runs_trial", "runs", ["trial_id", "id"], unique=False)
