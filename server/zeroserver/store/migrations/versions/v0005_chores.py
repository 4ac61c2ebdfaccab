"""Pending removals in object stores, and of parts of checkpoints."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the table of chores from that of directories."""
    chores = op.create_table(
        "chores",
        sa.Column("id", _ID, nullable=False),
        sa.Column("chore", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_chores")),
        sqlite_autoincrement=True,
    )
    paths = op.get_bind().execute(sa.text("SELECT path FROM discarded")).scalars().all()
    for path in paths:
        root, _, name = path.rpartition("/")
        chore = json.dumps({"storage": {"root": root}, "name": name})
        op.execute(sa.insert(chores).values(chore=chore))
    op.drop_table("discarded")


def downgrade() -> None:
    """Make the table of directories again; what lies in object stores stays there."""
    op.create_table(
        "discarded",
        sa.Column("path", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("path", name=op.f("pk_discarded")),
    )
    for text in op.get_bind().execute(sa.text("SELECT chore FROM chores")).scalars().all():
        chore = json.loads(text)
        if "://" not in chore["storage"]["root"] and not chore.get("files") and chore.get("name"):
            path = f"{chore['storage']['root']}/{chore['name']}"
            op.execute(sa.text("INSERT INTO discarded (path) VALUES (:path)").bindparams(path=path))
    op.drop_table("chores")
