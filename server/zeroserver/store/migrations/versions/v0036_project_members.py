"""Projects that only their members see."""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table of members; all projects stay open to everybody."""
    op.add_column(
        "projects", sa.Column("restricted", sa.Integer(), nullable=False, server_default="0")
    )
    op.create_table(
        "project_members",
        sa.Column("project_id", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("user_id", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.PrimaryKeyConstraint("project_id", "user_id", name=op.f("pk_project_members")),
    )


def downgrade() -> None:
    """Drop both."""
    op.drop_table("project_members")
    op.drop_column("projects", "restricted")
