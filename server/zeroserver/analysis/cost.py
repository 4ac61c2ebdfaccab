"""Cost of trials: the slot-seconds of their runs."""

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from zeroserver.store.database import raw_rows

__all__ = ["count_host_slots", "slot_seconds_in", "slot_seconds_of"]

_QUERY = """
    SELECT r.trial_id, r.experiment_id, sum(
        CASE WHEN coalesce(r.ended_at, ?) > r.created_at  -- a clock can be set back
        THEN coalesce(r.ended_at, ?) - r.created_at ELSE 0.0 END)
    FROM runs r WHERE r.trial_id IN ({which}) GROUP BY r.trial_id, r.experiment_id
"""
_OF_EXPERIMENT = _QUERY.format(which="SELECT id FROM trials WHERE experiment_id = ?")
_SLOTS = "SELECT id, slots, host_slots FROM experiments WHERE id IN ({})"


def slot_seconds_of(
    connection: Connection, trial_ids: Sequence[int], now: float
) -> dict[int, float]:
    """Return slots x seconds of trials by their ids; trials that never ran are omitted.

    With a hostfile, the slots used on its machines count.

    Args:
        connection: Database connection.
        trial_ids: Ids of the trials.
        now: Assumed end of open runs, in seconds since 1970.
    """
    if not trial_ids:
        return {}
    which = ", ".join("?" * len(trial_ids))
    return _costs(connection, _QUERY.format(which=which), (now, now, *trial_ids))


def slot_seconds_in(connection: Connection, experiment_id: int, now: float) -> dict[int, float]:
    """Return slots x seconds of all trials of an experiment."""
    return _costs(connection, _OF_EXPERIMENT, (now, now, experiment_id))


def count_host_slots(host_slots: str) -> int:
    """Count the slots of a trial on a hostfile's machines; 0 without a hostfile.

    Args:
        host_slots: Column ``host_slots`` of the experiment.
    """
    return len(msgspec.json.decode(host_slots, type=list[str]))


def _costs(connection: Connection, query: str, row: tuple[Any, ...]) -> dict[int, float]:
    rows = raw_rows(connection, query, row)
    experiment_ids = tuple({experiment_id for _, experiment_id, _ in rows})
    if not experiment_ids:
        return {}
    slots_query = _SLOTS.format(", ".join("?" * len(experiment_ids)))
    slots = {
        experiment_id: count_host_slots(host_slots) or number
        for experiment_id, number, host_slots in raw_rows(connection, slots_query, experiment_ids)
    }
    return {trial: slots[experiment_id] * float(seconds) for trial, experiment_id, seconds in rows}
