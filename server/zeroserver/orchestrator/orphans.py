"""Removal of points, logs and media of trials without a row, in several transactions.

A deleted trial leaves them, or an import that was interrupted when its server stopped.
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
"""Maximum number of deleted trials whose rows one transaction removes."""
_ROWS = 20_000
"""Number of rows after which a transaction stops."""

# Finds the smallest trial with rows, then the next larger one, and so on: one index lookup per
# trial, independent of the number of its rows.
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
    # Roll-ups are removed after the points, because `find` detects leftover points by them.
    "points": "key_id, step",
    "rollups": "shift, key_id, bucket",
    "logs": "id",
    "media": "name, step, position",
}


class OrphanService(Service):
    """Removes points, logs and media of trials that have no row."""

    def forget_points(self, trial_id: int) -> None:
        """Delete all points and roll-ups of a trial."""
        for table in (points, rollups):
            self.work.connection.execute(delete(table).where(table.c.trial_id == trial_id))

    def add(self, trial_ids: Sequence[int]) -> None:
        """Schedule the points and logs of deleted trials for removal in later transactions.

        They are unreachable without their trials. After a crash, :meth:`find` schedules the
        remaining ones at the next start.
        """
        orphans = self.work.orchestrator.deletions.orphans
        orphans.extend(trial_ids)
        for trial_id in trial_ids:
            self.work.orchestrator.metrics.reported.pop(trial_id, None)
            self.work.undo.append(partial(orphans.remove, trial_id))

    def find(self) -> None:
        """Schedule removal of data that interrupted imports and deletions left."""
        deletions = self.work.orchestrator.deletions
        trial_ids: dict[int, None] = {}
        for table in ("rollups", "logs", "media"):
            rows = self.work.raw(_ORPHANS.format(table=table))
            trial_ids |= dict.fromkeys(trial_id for (trial_id,) in rows)
        new = trial_ids.keys() - deletions.importing
        if new:
            logger.info("removing points and logs of %d deleted trial(s)", len(new))
            deletions.orphans.extend(sorted(new.difference(deletions.orphans)))

    def remove_some(self) -> None:
        """Remove a limited number of rows of deleted trials."""
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
