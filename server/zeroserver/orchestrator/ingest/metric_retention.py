"""Retention of metrics: removes old points of ended experiments, some in each transaction.

Of each bucket of ``2**THINNED_SHIFT`` steps, the roll-up and the last point stay, so curves, their
times, and minimum, maximum and last value stay right. Buckets at a checkpoint or at the end of a
metric stay complete: the roll-ups of a continued trial are recomputed from their points.
"""

from collections.abc import Set
from typing import NamedTuple

from zeroserver.orchestrator.caches import MetricCache
from zeroserver.orchestrator.service import Service
from zeroserver.store.points import SHIFTS, THINNED_SHIFT
from zeroserver.store.schema import experiments

__all__ = ["MetricRetentionService"]

_POINTS = 20_000
"""Approximate maximum number of points that one transaction removes."""
_BUCKETS = 1000
"""Maximum number of buckets that one query returns."""
_TRIAL_COST = 200
"""Fixed cost of a trial, in points."""

_DUE = (
    "SELECT id FROM experiments WHERE metric_retention_days IS NOT NULL AND deleting = 0 "
    "AND ended_at <= ? - metric_retention_days * 86400.0 "
    "AND (metrics_expired_at IS NULL OR metrics_expired_at < ended_at) ORDER BY id LIMIT 1"
)
# Readers then expect removed points, but the experiment is still due, as this time is too early.
_START = (
    "UPDATE experiments SET metrics_expired_at = ended_at - 1 "
    "WHERE id = ? AND metrics_expired_at IS NULL"
)
_TRIAL = "SELECT id FROM trials WHERE experiment_id = ? AND id >= ? ORDER BY id LIMIT 1"
_ENDS = (
    "SELECT r.key_id, max(r.last_step) FROM rollups r JOIN metric_keys k ON k.id = r.key_id "  # noqa: S608 - our own words
    f"WHERE r.trial_id = ? AND r.shift = {SHIFTS[-1]} AND k.group_name IN ('training', 'system') "
    "GROUP BY r.key_id"
)
_CHECKPOINTS = (
    "SELECT DISTINCT steps_completed FROM checkpoints WHERE trial_id = ? AND state = 'COMPLETED'"
)
_NEXT = (
    "SELECT key_id, bucket, count, last_step FROM rollups "  # noqa: S608 - our own words
    f"WHERE trial_id = ? AND shift = {THINNED_SHIFT} AND (key_id, bucket) > (?, ?) "
    f"ORDER BY key_id, bucket LIMIT {_BUCKETS}"
)
_DELETE_POINTS = "DELETE FROM points WHERE trial_id = ? AND key_id = ? AND step >= ? AND step < ?"
_DELETE_ROLLUPS = (
    "DELETE FROM rollups WHERE trial_id = ? AND shift = ? AND key_id = ? "
    "AND bucket >= ? AND bucket < ?"
)


class _Position(NamedTuple):
    """Position in an experiment: after a bucket of a metric of a trial."""

    experiment_id: int = 0
    trial_id: int = 0
    key_id: int = 0
    bucket: int = -1


class MetricRetentionService(Service):
    """Removes the points of experiments that ended longer ago than their retention."""

    @property
    def cache(self) -> MetricCache:
        """State that outlives the unit of work."""
        return self.work.orchestrator.metrics

    def expire(self) -> bool:
        """Remove some points of an experiment; return whether to call it again.

        After a restart of the server, it starts again with the first trial of the experiment.
        """
        due = self.work.raw(_DUE, (self.work.clock(),))
        if not due:
            self.cache.thinned = None
            return False
        position = _Position(*self.cache.thinned or ())
        if position.experiment_id != due[0][0]:
            position = _Position(due[0][0])
            self.work.run(_START, (position.experiment_id,))
        budget = _POINTS
        while budget > 0:
            trial = self.work.raw(_TRIAL, (position.experiment_id, position.trial_id))
            if not trial:
                self.work.save(
                    experiments, position.experiment_id, metrics_expired_at=self.work.clock()
                )
                self.work.touch("experiment", position.experiment_id, position.experiment_id)
                break
            if trial[0][0] != position.trial_id:
                position = _Position(position.experiment_id, trial[0][0])
            position, cost = self._thin(position, budget)
            budget -= cost + _TRIAL_COST
        self.work.then.append(lambda: self._save_position(position))
        return True

    def _save_position(self, position: _Position) -> None:
        self.cache.thinned = position

    def _thin(self, position: _Position, budget: int) -> tuple[_Position, int]:
        """Remove points of a trial; return the next position and the number of points."""
        trial_id = position.trial_id
        ends = {key: last >> THINNED_SHIFT for key, last in self.work.raw(_ENDS, (trial_id,))}
        saved = {steps >> THINNED_SHIFT for (steps,) in self.work.raw(_CHECKPOINTS, (trial_id,))}
        buckets = self.work.raw(_NEXT, (trial_id, position.key_id, position.bucket))
        ranges, cost = [], 0
        for key, bucket, count, last_step in buckets:
            if cost >= budget:
                break
            position = position._replace(key_id=key, bucket=bucket)
            cost += 1
            if _is_removable(key, bucket, ends, saved) and count > 1:
                ranges.append((key, bucket, last_step))
                cost += count
        else:
            if len(buckets) < _BUCKETS:
                position = _Position(position.experiment_id, trial_id + 1)
        finest, width = SHIFTS[0], THINNED_SHIFT - SHIFTS[0]
        self.work.many(
            _DELETE_POINTS,
            [(trial_id, key, bucket << THINNED_SHIFT, last) for key, bucket, last in ranges],
        )
        self.work.many(
            _DELETE_ROLLUPS,
            [
                (trial_id, finest, key, bucket << width, (bucket + 1) << width)
                for key, bucket, _ in ranges
            ],
        )
        return position, cost


def _is_removable(key: int, bucket: int, ends: dict[int, int], saved: Set[int]) -> bool:
    """Check whether a bucket is of a training or system metric and need not stay complete."""
    return key in ends and bucket != ends[key] and bucket not in saved
