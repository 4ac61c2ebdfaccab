"""Tables of the database.

Times are seconds since 1970 (UTC). JSON columns contain text encoded by msgspec. A metric point is
``(trial, key, step) -> value`` with integer keys; this primary key makes repeated reports count
once. NULL means NaN, which SQLite cannot store. :data:`HEAD` is the newest migration; a server with
an up-to-date database need not import Alembic.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    event,
    text,
)

__all__ = [
    "HEAD",
    "WAITING",
    "WEIGHTS_MISSING",
    "agents",
    "audit",
    "checkpoints",
    "chores",
    "comments",
    "config_defaults",
    "experiments",
    "logs",
    "media",
    "metadata",
    "metric_keys",
    "model_aliases",
    "model_versions",
    "models",
    "notification_channels",
    "notifications",
    "points",
    "pools",
    "project_members",
    "projects",
    "quota_requests",
    "quotas",
    "rollups",
    "run_nodes",
    "runs",
    "searcher_events",
    "server_lock",
    "shares",
    "tokens",
    "trials",
    "users",
    "views",
]

HEAD = "0039"

WAITING = (
    "state = 'QUEUED' AND run_id IS NULL "
    "AND (source_trial_id IS NULL OR source_checkpoint IS NOT NULL)"
)
"""Condition for trials that wait only for slots."""

WEIGHTS_MISSING = "source_trial_id IS NOT NULL AND source_checkpoint IS NULL"
"""Condition for trials that wait for a checkpoint of another trial."""

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

# SQLite assigns ids only to an INTEGER primary key.
Id = BigInteger().with_variant(Integer, "sqlite")

users = Table(  # never deleted, since experiments belong to them
    "users",
    metadata,
    Column("id", Id, primary_key=True),  # 1: the administrator with the installation's token
    Column("name", Text, nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("active", Integer, nullable=False, server_default="1"),
    Column("created_at", Double, nullable=False),
    Column("password", Text, nullable=True),  # argon2id hash; NULL: no sign-in with a password
    Column("oidc_subject", Text, nullable=True),  # id at the OpenID Connect provider
    Column("weight", Double, nullable=False, server_default="1"),  # share of the slots
    Index("ix_users_oidc_subject", "oidc_subject", unique=True),
    sqlite_autoincrement=True,
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Id, primary_key=True),
    Column("user_id", Id, ForeignKey("users.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("digest", String(64), nullable=False, unique=True),  # SHA-256 of the token
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=True),  # NULL: never
    Column("last_used_at", Double, nullable=True),
    Index("ix_tokens_user", "user_id"),
    sqlite_autoincrement=True,
)

shares = Table(  # links for readers without an account
    "shares",
    metadata,
    Column("id", Id, primary_key=True),
    Column("owner_id", Id, ForeignKey("users.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("digest", String(64), nullable=False, unique=True),  # SHA-256 of the token
    Column("experiment_ids", Text, nullable=False),  # JSON list
    Column("path", Text, nullable=False),  # of the page, after `#`
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index("ix_shares_owner", "owner_id"),
    sqlite_autoincrement=True,
)

views = Table(  # saved views of the page
    "views",
    metadata,
    Column("id", Id, primary_key=True),
    Column("owner_id", Id, ForeignKey("users.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("path", Text, nullable=False),  # of the page, after `#`: filters, columns, order, ...
    Column("shared", Integer, nullable=False),  # 1: everybody sees it
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    UniqueConstraint("owner_id", "name", name="uq_views_name"),
    sqlite_autoincrement=True,
)

audit = Table(  # changes by users
    "audit",
    metadata,
    Column("id", Id, primary_key=True),
    Column("time", Double, nullable=False),
    Column("user_id", BigInteger, nullable=False),
    Column("token_id", BigInteger, nullable=False),  # 0: token of the installation, or password
    Column("action", Text, nullable=False),  # method and path of the request
    Index("ix_audit_user", "user_id", "id"),
    sqlite_autoincrement=True,
)

projects = Table(  # never deleted, since experiments belong to them
    "projects",
    metadata,
    Column("id", Id, primary_key=True),  # 1: `default`
    Column("name", Text, nullable=False, unique=True),
    Column("description", Text, nullable=False, server_default=""),
    Column("notes", Text, nullable=False, server_default=""),
    Column("archived", Integer, nullable=False, server_default="0"),
    Column("owner_id", BigInteger, nullable=False, server_default="1"),  # a user
    Column("created_at", Double, nullable=False),
    Column("restricted", Integer, nullable=False, server_default="0"),  # to its members
    sqlite_autoincrement=True,
)

project_members = Table(  # besides the owner
    "project_members",
    metadata,
    Column("project_id", BigInteger, primary_key=True, autoincrement=False),
    Column("user_id", BigInteger, primary_key=True, autoincrement=False),
)

config_defaults = Table(
    "config_defaults",
    metadata,
    # A project's id; 0: the installation.
    Column("scope", BigInteger, primary_key=True, autoincrement=False),
    Column("content", Text, nullable=False),  # JSON: config, limits
    Column("updated_at", Double, nullable=False),
)

experiments = Table(
    "experiments",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Text, nullable=False),
    Column("description", Text, nullable=False, default=""),
    Column("labels", Text, nullable=False, default="[]"),
    Column("notes", Text, nullable=False, default=""),
    Column("state", String(24), nullable=False),
    Column("config", Text, nullable=False),  # resolved, defaults filled in
    Column("raw_config", Text, nullable=False),  # as submitted; forks start from it
    Column("archive", String(64), nullable=True),  # SHA-256 of the model directory's tar.gz
    Column("archived", Integer, nullable=False, default=0),
    Column("test_mode", Integer, nullable=False, default=0),
    Column("forked_from", Id, nullable=True),
    Column("source_checkpoint", String(36), nullable=True),  # initial weights of its trials
    Column("searcher_name", Text, nullable=False),
    Column("metric", Text, nullable=False),  # empty: none (single trial)
    Column("smaller_is_better", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("slots", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("weight", Double, nullable=False, default=1.0),
    Column("max_slots", Integer, nullable=True),
    Column("pool", Text, nullable=False, server_default="default"),
    Column("position", Double, nullable=False, server_default="0"),  # in the queue
    Column("queue_time", Integer, nullable=True),  # seconds
    Column("concurrent_trials", Integer, nullable=False, server_default="0"),  # 0: any number
    Column("max_nodes", Integer, nullable=False, server_default="1"),
    Column("slots_per_rank", Integer, nullable=False, server_default="1"),
    Column("fewer_slots", Text, nullable=False, server_default="[]"),  # acceptable smaller numbers
    Column("host_slots", Text, nullable=False, server_default="[]"),  # slots of a hostfile
    Column("waits_since", Double, nullable=True),  # without slots; if queue_time is set
    Column("searcher_done", Integer, nullable=False, default=0),
    Column("progress", Double, nullable=False, default=0.0),
    Column("num_trials", Integer, nullable=False, default=0),
    Column("failed_trials", Integer, nullable=False, server_default="0"),
    Column("canceled_trials", Integer, nullable=False, server_default="0"),
    Column("best_trial_id", Id, nullable=True),
    Column("best_validation", Double, nullable=True),
    Column("error", Text, nullable=True),
    Column("log_retention_days", Integer, nullable=True),  # after a trial's end; NULL: forever
    Column("metric_retention_days", Integer, nullable=True),  # after its end; NULL: forever
    Column("metrics_expired_at", Double, nullable=True),  # when old points were removed
    Column("creating", Integer, nullable=False, server_default="0"),  # trials are still created
    Column("deleting", Integer, nullable=False, server_default="0"),  # partly deleted
    Column("retention_due", Integer, nullable=False, server_default="0"),  # for all its checkpoints
    Column("unread_hparams", Text, nullable=True),  # by any finished run; NULL: unknown
    Column("created_at", Double, nullable=False),
    Column("started_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    Column("owner_id", BigInteger, nullable=False, server_default="1"),  # a user
    Column("project_id", BigInteger, nullable=False, server_default="1"),
    Column("external_id", String(128), nullable=True),  # chosen by a program without an agent
    Index("ix_experiments_state", "state", "id"),
    Index("ix_experiments_place", "pool", "position"),
    Index("ix_experiments_project", "project_id", "id"),
    Index("ix_experiments_external", "external_id"),
    sqlite_autoincrement=True,
)

trials = Table(
    "trials",
    metadata,
    Column("id", Id, primary_key=True),
    Column("experiment_id", Id, ForeignKey("experiments.id"), nullable=False),
    Column("request_id", Integer, nullable=False),  # the searcher's number of the trial
    Column("state", String(16), nullable=False),
    Column("hparams", Text, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("restarts", Integer, nullable=False, default=0),
    Column("run_id", Id, nullable=True),  # its current run
    Column("until", BigInteger, nullable=True),  # length at which the searcher pauses it
    Column("waits", Integer, nullable=False, default=0),  # paused by the searcher
    Column("stop", String(16), nullable=True),  # reason of its stop: searcher, cancel, kill
    Column("restart_at", Double, nullable=True),  # earliest restart after a failure
    Column("steps_completed", BigInteger, nullable=False, default=0),
    Column("progress", Double, nullable=False, default=0.0),
    Column("searcher_steps", BigInteger, nullable=False, default=-1),  # sent to the searcher
    Column("best_validation", Double, nullable=True),
    Column("best_steps", BigInteger, nullable=True),
    Column("latest_validation", Double, nullable=True),
    Column("latest_checkpoint", String(36), nullable=True),
    Column("best_checkpoint", String(36), nullable=True),
    Column("source_trial_id", Id, nullable=True),  # source of its initial weights
    Column("source_steps", BigInteger, nullable=True),  # steps of the source at that time
    Column("source_checkpoint", String(36), nullable=True),  # NULL: not chosen yet, "": none
    Column("held", Integer, nullable=False, server_default="0"),  # paused by a user
    Column("activity", Text, nullable=True),
    Column("excluded", Text, nullable=False, default="[]"),  # agents, by log policies
    Column("labels", Text, nullable=False, default="[]"),  # names of log policies that matched
    Column("archived", Integer, nullable=False, server_default="0"),
    Column("error", Text, nullable=True),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    UniqueConstraint("experiment_id", "request_id"),
    Index("ix_trials_experiment", "experiment_id", "id"),
    Index("ix_trials_best", "experiment_id", "best_validation", "id"),
    Index("ix_trials_state", "state", "experiment_id"),
    sqlite_autoincrement=True,
)

# For the scheduler's query of queued trials in every round.
Index(
    "ix_trials_waiting",
    trials.c.experiment_id,
    trials.c.excluded,
    trials.c.restart_at,
    trials.c.id,
    trials.c.state,  # a covering index for SQLite
    trials.c.run_id,
    trials.c.source_trial_id,
    trials.c.source_checkpoint,
    sqlite_where=text(WAITING),
)
Index("ix_trials_restart", trials.c.restart_at)
Index(
    "ix_trials_source",
    trials.c.source_trial_id,
    sqlite_where=text(WEIGHTS_MISSING),
)


@event.listens_for(metadata, "before_create")
def _partial_on_postgresql(_target: object, connection: Connection, **_options: Any) -> None:
    """Copy the conditions of partial indexes to PostgreSQL's dialect options.

    Setting them in the declarations would load that dialect at every start with SQLite.
    """
    if connection.dialect.name == "postgresql":
        for index in trials.indexes:
            options = index.dialect_options
            options["postgresql"]["where"] = options["sqlite"]["where"]


agents = Table(
    "agents",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("host", Text, nullable=False),
    Column("pool", Text, nullable=False, server_default="default"),
    Column("identity", Text, nullable=False, server_default=""),  # id of its data directory
    Column("slots", Text, nullable=False),
    Column("alive", Integer, nullable=False, default=1),
    Column("enabled", Integer, nullable=False, server_default="1"),
    Column("leaving", Integer, nullable=False, server_default="0"),  # stops after its last run
    Column("disabled_slots", Text, nullable=False, server_default="[]"),
    Column("registered_at", Double, nullable=False),
    sqlite_autoincrement=True,
)

pools = Table(  # pools with a policy; others exist through their agents
    "pools",
    metadata,
    Column("name", Text, primary_key=True),
    Column("policy", String(16), nullable=False),
)

quotas = Table(
    "quotas",
    metadata,
    Column("group_name", Text, primary_key=True),  # such as pool:NAME
    Column("max_slots", Integer, nullable=False),
    Column("request_limit", Integer, nullable=True),  # the most that a user may request
)

quota_requests = Table(  # of users for more slots
    "quota_requests",
    metadata,
    Column("id", Id, primary_key=True),
    Column("user_id", BigInteger, nullable=False),
    Column("max_slots", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("state", String(8), nullable=False),  # OPEN, APPROVED, DECLINED
    Column("created_at", Double, nullable=False),
    Column("decided_at", Double, nullable=True),
    Column("decided_by", BigInteger, nullable=True),  # a user
    Column("answer", Text, nullable=False, server_default=""),
    Index("ix_quota_requests_state", "state", "user_id"),
    sqlite_autoincrement=True,
)

runs = Table(
    "runs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("trial_id", Id, ForeignKey("trials.id"), nullable=False),
    Column("experiment_id", Id, ForeignKey("experiments.id"), nullable=False),
    Column("agent_id", Id, ForeignKey("agents.id"), nullable=True),
    Column("slot_ids", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("directive", String(8), nullable=False, default="train"),
    Column("deadline_at", Double, nullable=True),
    Column("killed", Integer, nullable=False, default=0),
    Column("killed_at", Double, nullable=True),
    Column("no_retry", Integer, nullable=False, default=0),  # by a log policy
    Column("grows_to", Integer, nullable=True),  # slots for which it was preempted
    Column("spec", Text, nullable=False),
    Column("last_seq", BigInteger, nullable=False, default=0),
    Column("next_log", BigInteger, nullable=False, default=0),
    Column("log_bytes", BigInteger, nullable=False, server_default="0"),  # of the stored lines
    Column("log_first", BigInteger, nullable=True),  # id of the oldest stored line
    Column("log_dropped_lines", BigInteger, nullable=False, server_default="0"),
    Column("log_dropped_bytes", BigInteger, nullable=False, server_default="0"),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    Column("exit_code", Integer, nullable=True),
    Column("reason", Text, nullable=True),
    Index("ix_runs_trial", "trial_id", "id"),
    Index("ix_runs_state", "state", "agent_id"),
    Index("ix_runs_experiment", "experiment_id"),
    sqlite_autoincrement=True,
)

run_nodes = Table(  # runs on several agents: one row per agent, including the first
    "run_nodes",
    metadata,
    Column("run_id", BigInteger, primary_key=True, autoincrement=False),
    Column("node_rank", Integer, primary_key=True, autoincrement=False),
    Column("agent_id", Id, nullable=True),
    Column("slot_ids", Text, nullable=False),
    Column("address", Text, nullable=True),  # host:port of the first rank, for the rendezvous
    Column("next_log", BigInteger, nullable=False, default=0),
    Column("ended_at", Double, nullable=True),
    Column("exit_code", Integer, nullable=True),
    Column("reason", Text, nullable=True),
    Column("told", Integer, nullable=False, default=0),  # it was stopped and did not fail
    sqlite_with_rowid=False,
)

metric_keys = Table(
    "metric_keys",
    metadata,
    Column("id", Id, primary_key=True),
    Column("group_name", Text, nullable=False),
    Column("name", Text, nullable=False),
    UniqueConstraint("group_name", "name"),
)

points = Table(
    "points",
    metadata,
    Column("trial_id", BigInteger, primary_key=True, autoincrement=False),
    Column("key_id", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("value", Double, nullable=True),
    Column("time", Double, nullable=False),
    sqlite_with_rowid=False,
)

rollups = Table(
    "rollups",
    metadata,
    Column("trial_id", BigInteger, primary_key=True, autoincrement=False),
    Column("shift", SmallInteger, primary_key=True, autoincrement=False),  # 2**shift steps wide
    Column("key_id", BigInteger, primary_key=True, autoincrement=False),
    Column("bucket", BigInteger, primary_key=True, autoincrement=False),
    Column("least", Double, nullable=True),
    Column("most", Double, nullable=True),
    Column("total", Double, nullable=False),  # of the finite values
    Column("finite", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),  # including NaN and infinities
    Column("last_step", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

logs = Table(
    "logs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("experiment_id", BigInteger, nullable=False),
    Column("trial_id", BigInteger, nullable=True),
    Column("run_id", BigInteger, nullable=True),
    Column("rank", Integer, nullable=True),
    Column("stream", String(8), nullable=False),
    Column("level", String(16), nullable=True),
    Column("text", Text, nullable=False),
    Column("time", Double, nullable=False),
    Column("host", Text, nullable=True),
    Index("ix_logs_trial", "trial_id", "id"),
    Index("ix_logs_experiment", "experiment_id", "id"),
    sqlite_autoincrement=True,
)

media = Table(  # the content is in the checkpoint storage
    "media",
    metadata,
    Column("trial_id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("position", Integer, primary_key=True, autoincrement=False),  # among those of a step
    Column("type", String(16), nullable=False),
    Column("digest", String(64), nullable=False),  # SHA-256; empty: metadata is the content
    Column("size", BigInteger, nullable=False),
    Column("suffix", String(40), nullable=False),
    Column("metadata", Text, nullable=False),
    Column("time", Double, nullable=False),
    Index("ix_media_digest", "trial_id", "digest", "size"),  # covers the totals of a trial
    sqlite_with_rowid=False,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", Id, primary_key=True),
    Column("uuid", String(36), nullable=False, unique=True),
    Column("trial_id", Id, ForeignKey("trials.id"), nullable=False),
    Column("experiment_id", Id, ForeignKey("experiments.id"), nullable=False),
    Column("run_id", BigInteger, nullable=True),
    Column("steps_completed", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("resources", Text, nullable=False),
    Column("metadata", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Index("ix_checkpoints_trial", "trial_id", "steps_completed"),
    Index("ix_checkpoints_experiment", "experiment_id", "id"),
    sqlite_autoincrement=True,
)

models = Table(
    "models",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("description", Text, nullable=False, default=""),
    Column("last_version", Integer, nullable=False, server_default="0"),
    Column("created_at", Double, nullable=False),
    Column("owner_id", BigInteger, nullable=False, server_default="1"),  # a user
    Column("project_id", BigInteger, nullable=False, server_default="1"),
    sqlite_autoincrement=True,
)

model_versions = Table(  # these checkpoints are never pruned
    "model_versions",
    metadata,
    Column("model_id", BigInteger, primary_key=True, autoincrement=False),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("checkpoint", String(36), nullable=False),  # its uuid
    Column("notes", Text, nullable=False, default=""),
    Column("created_at", Double, nullable=False),
    Index("ix_model_versions_checkpoint", "checkpoint"),
    sqlite_with_rowid=False,
)

model_aliases = Table(  # names of versions, which users move from one version to another
    "model_aliases",
    metadata,
    Column("model_id", BigInteger, primary_key=True, autoincrement=False),
    Column("alias", String(64), primary_key=True),
    Column("version", Integer, nullable=False),
    sqlite_with_rowid=False,
)

notification_channels = Table(
    "notification_channels",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("kind", String(8), nullable=False),  # webhook, apprise
    Column("url", Text, nullable=False),  # a secret, like the next one; never in a response
    Column("secret", Text, nullable=False),  # signs the messages of a webhook
    Column("events", Text, nullable=False),
    Column("all_experiments", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    # experiments of which it gets messages without being named; 0: of no user, of no project
    Column("user_id", BigInteger, nullable=False, server_default="0"),
    Column("project_id", BigInteger, nullable=False, server_default="0"),
    sqlite_autoincrement=True,
)

notifications = Table(  # outbox: one row for each event and channel
    "notifications",
    metadata,
    Column("id", Id, primary_key=True),
    Column("channel_id", BigInteger, nullable=False),
    Column("event_key", Text, nullable=False),
    Column("event", String(16), nullable=False),
    Column("experiment_id", BigInteger, nullable=False),
    Column("message", Text, nullable=False),
    Column("state", String(8), nullable=False),  # PENDING, SENT, FAILED
    Column("attempts", Integer, nullable=False, default=0),
    Column("due_at", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    Column("error", Text, nullable=True),
    UniqueConstraint("channel_id", "event_key", name="uq_notifications_event"),
    Index("ix_notifications_due", "state", "due_at"),
    Index("ix_notifications_channel", "channel_id", "state", "id"),
    Index("ix_notifications_experiment", "experiment_id", "id"),
    sqlite_autoincrement=True,
)

comments = Table(
    "comments",
    metadata,
    Column("id", Id, primary_key=True),
    Column("experiment_id", Id, ForeignKey("experiments.id"), nullable=False),
    Column("owner_id", Id, ForeignKey("users.id"), nullable=False),  # the author
    Column("text", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("edited_at", Double, nullable=True),
    Index("ix_comments_experiment", "experiment_id", "id"),
    sqlite_autoincrement=True,
)

chores = Table(  # removals of files; deleted when done
    "chores",
    metadata,
    Column("id", Id, primary_key=True),
    Column("chore", Text, nullable=False),
    sqlite_autoincrement=True,
)

server_lock = Table(  # the server that holds the database: one row
    "server_lock",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("instance", String(32), nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_at", Double, nullable=False),
)

searcher_events = Table(
    "searcher_events",
    metadata,
    Column("id", Id, primary_key=True),
    Column("experiment_id", Id, ForeignKey("experiments.id"), nullable=False),
    Column("kind", String(24), nullable=False),
    Column("request_id", Integer, nullable=False),
    Column("value", Double, nullable=True),  # the metric of a validation; NULL is NaN
    Column("length", Double, nullable=True),  # in the searcher's unit
    Column("reason", Text, nullable=True),
    Column("time", Double, nullable=False),
    Index("ix_searcher_events_experiment", "experiment_id", "id"),
    sqlite_autoincrement=True,
)
