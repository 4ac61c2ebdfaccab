"""Tables of MLflow's names and tags; metrics, parameters and files are those of the trials.

The extension creates them itself, so that its folder can be deleted. A later version may add
tables or nullable columns. No key refers to the tables of the core, since the restore of a backup
that has no such tables could not replace those of the core.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

__all__ = ["mlflow_experiments", "mlflow_models", "mlflow_runs", "tables"]

tables = MetaData()

Id = BigInteger().with_variant(Integer, "sqlite")

mlflow_experiments = Table(
    "mlflow_experiments",
    tables,
    Column("id", Id, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("owner_id", BigInteger, nullable=False),
    Column("stage", String(16), nullable=False),  # active or deleted
    Column("tags", Text, nullable=False),  # JSON
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
)

mlflow_runs = Table(
    "mlflow_runs",
    tables,
    Column("uuid", String(32), primary_key=True),
    Column("mlflow_experiment_id", BigInteger, nullable=False, index=True),
    Column("experiment_id", BigInteger, nullable=False, index=True),
    Column("trial_id", BigInteger, nullable=False),
    Column("run_id", BigInteger, nullable=False),
    Column("name", Text, nullable=False),
    Column("stage", String(16), nullable=False),
    Column("params", Text, nullable=False),  # JSON; texts, as MLflow has them
    Column("tags", Text, nullable=False),  # JSON
    Column("start_ms", BigInteger, nullable=False),
    Column("end_ms", BigInteger, nullable=True),
)

mlflow_models = Table(  # models that log_model has written as artifacts of a run
    "mlflow_models",
    tables,
    Column("id", String(34), primary_key=True),
    Column(
        "run_uuid",
        String(32),
        ForeignKey(mlflow_runs.c.uuid, ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("content", Text, nullable=False),  # JSON
)
