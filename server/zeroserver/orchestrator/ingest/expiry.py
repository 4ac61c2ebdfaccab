"""Removal of logs whose retention is over (``retention_policy.log_retention_days``)."""

from zeroserver.orchestrator.unit_of_work import UnitOfWork

__all__ = ["expire_logs"]

_LINES = 5000
"""Lines that one change removes."""
_EXPIRED = (
    "SELECT t.id FROM trials t JOIN experiments e ON e.id = t.experiment_id "
    "WHERE e.log_retention_days IS NOT NULL "
    "AND t.ended_at <= ? - e.log_retention_days * 86400.0 "
    "AND EXISTS (SELECT 1 FROM logs l WHERE l.trial_id = t.id) ORDER BY t.id LIMIT 1"
)
_DELETE = (
    "DELETE FROM logs WHERE id IN (SELECT id FROM logs WHERE trial_id = ? ORDER BY id LIMIT ?)"
)


def expire_logs(work: UnitOfWork) -> bool:
    """Remove some log lines of a trial that ended long enough ago; return whether there were any.

    Call it until it returns False.
    """
    for (trial_id,) in work.raw(_EXPIRED, (work.clock(),)):
        work.run(_DELETE, (trial_id, _LINES))
        return True
    return False
