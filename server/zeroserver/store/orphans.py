"""Points of trials that have no row: what an import leaves when the server dies in its middle."""

import logging
from collections.abc import Container

from sqlalchemy import delete

from zeroserver.store.database import Transaction
from zeroserver.store.schema import points, rollups

__all__ = ["forget_points", "sweep_points"]

logger = logging.getLogger(__name__)

# The smallest id with roll-ups, then the next one, and so on: as many looks into the index as
# there are trials, however many roll-ups each of them has.
_ORPHANS = """
    WITH RECURSIVE found(id) AS (
        SELECT min(trial_id) FROM rollups
        UNION ALL
        SELECT (SELECT min(trial_id) FROM rollups WHERE trial_id > found.id)
        FROM found WHERE found.id IS NOT NULL
    )
    SELECT id FROM found WHERE id IS NOT NULL AND id NOT IN (SELECT id FROM trials)
"""


def forget_points(transaction: Transaction, trial_id: int) -> None:
    """Delete all points of a trial, and their roll-ups."""
    for table in (points, rollups):
        transaction.connection.execute(delete(table).where(table.c.trial_id == trial_id))


def sweep_points(transaction: Transaction, coming: Container[int]) -> None:
    """Forget the points of trials without a row.

    Args:
        transaction: Of the writer.
        coming: Trials that will have one.
    """
    for (trial_id,) in transaction.raw(_ORPHANS):
        if trial_id not in coming:
            logger.info("an import was cut off: its points are removed (trial %d)", trial_id)
            forget_points(transaction, trial_id)
