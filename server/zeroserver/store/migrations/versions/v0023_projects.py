"""Projects, to which experiments and models belong."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_MEMBERS = ("experiments", "models")


def upgrade() -> None:
    """Create the first project, to which everything belongs."""
    projects = op.create_table(
        "projects",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False, server_default=""),
        sa.Column("notes", sa.Text(), nullable=False, server_default=""),
        sa.Column("archived", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("owner_id", sa.BigInteger(), nullable=False, server_default="1"),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
        sqlite_autoincrement=True,
    )
    # Without an id, so that PostgreSQL's sequence continues with 2.
    op.bulk_insert(projects, [{"name": "default", "created_at": time.time()}])
    for table in _MEMBERS:
        project = sa.Column("project_id", sa.BigInteger(), nullable=False, server_default="1")
        op.add_column(table, project)
    op.create_index("ix_experiments_project", "experiments", ["project_id", "id"])


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_experiments_project", "experiments")
    for table in _MEMBERS:
        op.drop_column(table, "project_id")
    op.drop_table("projects")
