"""Removal, in parts, of points and logs of trials that have no row.

They are left by a deleted trial, or by an import that a server's end interrupted.
"""

from collections.abc import Container

from sqlalchemy import delete

from zeroserver.store.database import Transaction
from zeroserver.store.schema import points, rollups

__all__ = ["ROWS", "find_orphans", "forget_points", "remove_part"]

ROWS = 20_000
"""Maximum number of rows that one change removes."""

# The smallest trial with rows, then the next one, and so on: as many looks into the index as
# there are trials, however many rows each of them has.
_ORPHANS = """
    WITH RECURSIVE found(id) AS (
        SELECT min(trial_id) FROM {table}
        UNION ALL
        SELECT (SELECT min(trial_id) FROM {table} WHERE trial_id > found.id)
        FROM found WHERE found.id IS NOT NULL
    )
    SELECT id FROM found WHERE id IS NOT NULL AND id NOT IN (SELECT id FROM trials)
"""
_KEYS = {
    # Roll-ups go last: they show, to the next start, that there are points.
    "points": "key_id, step",
    "rollups": "shift, key_id, bucket",
    "logs": "id",
}


def forget_points(transaction: Transaction, trial_id: int) -> None:
    """Delete all points of a trial, and their roll-ups."""
    for table in (points, rollups):
        transaction.connection.execute(delete(table).where(table.c.trial_id == trial_id))


def find_orphans(transaction: Transaction, coming: Container[int]) -> list[int]:
    """Return the trials without a row that have points or logs.

    Args:
        transaction: Of the writer.
        coming: Trials that will have a row.
    """
    trial_ids: dict[int, None] = {}
    for table in ("rollups", "logs"):
        trial_ids |= dict.fromkeys(
            number for (number,) in transaction.raw(_ORPHANS.format(table=table))
        )
    return [number for number in trial_ids if number not in coming]


def remove_part(transaction: Transaction, trial_id: int) -> tuple[int, bool]:
    """Remove some rows of a deleted trial; return their number, and whether none remain."""
    removed = 0
    for table, key in _KEYS.items():
        edge = transaction.raw(
            f"SELECT {key} FROM {table} WHERE trial_id = ? ORDER BY {key} LIMIT 1 OFFSET ?",  # noqa: S608 - our own names
            (trial_id, ROWS),
        )
        if not edge:
            removed += transaction.run(f"DELETE FROM {table} WHERE trial_id = ?", (trial_id,))  # noqa: S608
            continue
        marks = ", ".join("?" * len(edge[0]))
        removed += transaction.run(
            f"DELETE FROM {table} WHERE trial_id = ? AND ({key}) < ({marks})",  # noqa: S608
            (trial_id, *edge[0]),
        )
        return removed, False
    return removed, True
