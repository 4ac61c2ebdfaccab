"""What trials have cost: the time for which their runs have held slots."""

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
    """Return slots x seconds of some trials by their ids; those that never ran are absent.

    Where a hostfile says the machines, the slots are those of it that the ranks have.

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


def count_host_slots(host_slots: str) -> int:
    """Return how many slots of a hostfile's machines a trial has; 0 without a hostfile.

    Args:
        host_slots: The experiment's column.
    """
    return len(msgspec.json.decode(host_slots, type=list[str]))


def _costs(connection: Connection, query: str, row: tuple[Any, ...]) -> dict[int, float]:
    found = raw_rows(connection, query, row)
    homes = tuple({home for _, home, _ in found})
    if not homes:
        return {}
    asked = _SLOTS.format(", ".join("?" * len(homes)))
    slots = {
        home: count_host_slots(host_slots) or number
        for home, number, host_slots in raw_rows(connection, asked, homes)
    }
    return {trial: slots[home] * float(seconds) for trial, home, seconds in found}
