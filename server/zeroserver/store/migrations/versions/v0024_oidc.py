"""Users that sign in with an OpenID Connect provider."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("users", sa.Column("oidc_subject", sa.Text(), nullable=True))
    op.create_index("ix_users_oidc_subject", "users", ["oidc_subject"], unique=True)


def downgrade() -> None:
    """Drop it."""
    op.drop_index("ix_users_oidc_subject", "users")
    op.drop_column("users", "oidc_subject")
