"""What trials have cost: the time for which their runs have held slots."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from zeroserver.store.database import raw_rows

__all__ = ["slot_seconds_in", "slot_seconds_of"]

_QUERY = """
    SELECT r.trial_id, max(e.slots) * sum(
        CASE WHEN coalesce(r.ended_at, ?) > r.created_at  -- a clock can be set back
        THEN coalesce(r.ended_at, ?) - r.created_at ELSE 0.0 END)
    FROM runs r JOIN experiments e ON e.id = r.experiment_id
    WHERE r.trial_id IN ({which}) GROUP BY r.trial_id
"""
_OF_EXPERIMENT = _QUERY.format(which="SELECT id FROM trials WHERE experiment_id = ?")


def slot_seconds_of(
    connection: Connection, trial_ids: Sequence[int], now: float
) -> dict[int, float]:
    """Return slots x seconds of some trials by their ids; those that never ran are absent.

    Args:
        connection: For reading.
        trial_ids: Which trials.
        now: In seconds since 1970; until when runs that go on are counted.
    """
    if not trial_ids:
        return {}
    which = ", ".join("?" * len(trial_ids))
    return _costs(connection, _QUERY.format(which=which), (now, now, *trial_ids))


def slot_seconds_in(connection: Connection, experiment_id: int, now: float) -> dict[int, float]:
    """As :func:`slot_seconds_of`, of all trials of an experiment."""
    return _costs(connection, _OF_EXPERIMENT, (now, now, experiment_id))


def _costs(connection: Connection, query: str, row: tuple[Any, ...]) -> dict[int, float]:
    return {trial: float(cost) for trial, cost in raw_rows(connection, query, row)}
