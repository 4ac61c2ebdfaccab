"""Numbers of the failed and canceled trials of an experiment."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_COUNTS = {"failed_trials": "ERROR", "canceled_trials": "CANCELED"}


def upgrade() -> None:
    """Add the columns and count the existing trials."""
    for column, state in _COUNTS.items():
        count = sa.Column(column, sa.Integer(), nullable=False, server_default="0")
        op.add_column("experiments", count)
        op.execute(
            f"UPDATE experiments SET {column} = (SELECT count(*) FROM trials "  # noqa: S608 - our own words
            f"WHERE trials.state = '{state}' AND trials.experiment_id = experiments.id)"
        )


def downgrade() -> None:
    """Drop them."""
    for column in _COUNTS:
        op.drop_column("experiments", column)
