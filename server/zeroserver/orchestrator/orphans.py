"""Points and logs of trials that have no row, removed in parts.

They are left by a deleted trial, or by an import that a server's end interrupted.
"""

import logging
from collections.abc import Sequence
from functools import partial

from sqlalchemy import delete

from zeroserver.orchestrator.service import Service
from zeroserver.store.schema import points, rollups

__all__ = ["OrphanService"]

logger = logging.getLogger(__name__)

_TRIALS = 100
"""Deleted trials whose rows one change removes."""
_ROWS = 20_000
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


class OrphanService(Service):
    """Removes points and logs of trials that have no row."""

    def forget_points(self, trial_id: int) -> None:
        """Delete all points of a trial, and their roll-ups."""
        for table in (points, rollups):
            self.work.connection.execute(delete(table).where(table.c.trial_id == trial_id))

    def add(self, trial_ids: Sequence[int]) -> None:
        """Schedule the points and logs of deleted trials for removal in later changes.

        Nobody finds them without their trials. What a server that dies leaves of them, the next one
        removes at its start.
        """
        orphans = self.work.orchestrator.deletions.orphans
        orphans.extend(trial_ids)
        for trial_id in trial_ids:
            self.work.orchestrator.metrics.reported.pop(trial_id, None)
            self.work.undo.append(partial(orphans.remove, trial_id))

    def find(self) -> None:
        """Schedule the leftovers of imports and deletions that a killed server did not finish."""
        deletions = self.work.orchestrator.deletions
        trial_ids: dict[int, None] = {}
        for table in ("rollups", "logs"):
            rows = self.work.raw(_ORPHANS.format(table=table))
            trial_ids |= dict.fromkeys(trial_id for (trial_id,) in rows)
        new = trial_ids.keys() - deletions.importing
        if new:
            logger.info("removing points and logs of %d trial(s) that are gone", len(new))
            deletions.orphans.extend(sorted(new.difference(deletions.orphans)))

    def remove_some(self) -> None:
        """Remove some rows of deleted trials."""
        orphans = self.work.orchestrator.deletions.orphans
        removed = 0
        for _ in range(_TRIALS):
            if not orphans or removed >= _ROWS:
                return
            rows, done = self._remove_part(orphans[0])
            removed += rows
            if done:
                self.work.orchestrator.metrics.purge_due = True
                self.work.undo.append(partial(orphans.appendleft, orphans.popleft()))

    def _remove_part(self, trial_id: int) -> tuple[int, bool]:
        """Remove some rows of a deleted trial; return their number, and whether none remain."""
        removed = 0
        for table, key in _KEYS.items():
            edge = self.work.raw(
                f"SELECT {key} FROM {table} WHERE trial_id = ? ORDER BY {key} LIMIT 1 OFFSET ?",  # noqa: S608 - our own names
                (trial_id, _ROWS),
            )
            if not edge:
                removed += self.work.run(f"DELETE FROM {table} WHERE trial_id = ?", (trial_id,))  # noqa: S608
                continue
            marks = ", ".join("?" * len(edge[0]))
            removed += self.work.run(
                f"DELETE FROM {table} WHERE trial_id = ? AND ({key}) < ({marks})",  # noqa: S608
                (trial_id, *edge[0]),
            )
            return removed, False
        return removed, True
