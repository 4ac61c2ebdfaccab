"""The best value so far over time."""

import math
from typing import NamedTuple

from sqlalchemy import Connection, select

from zeroserver.store.schema import searcher_events, trials

__all__ = ["Better", "best_so_far"]


class Better(NamedTuple):
    """A validation that was better than all before it."""

    time: float
    """When the searcher was told, in seconds since 1970."""
    trial_id: int
    length: float | None
    """How far the trial was, in the searcher's unit."""
    value: float


def best_so_far(
    connection: Connection, experiment_id: int, *, smaller_is_better: bool
) -> tuple[list[Better], int]:
    """Return the validations that were better than all before, and how many there were at all.

    One query along the index of the searcher's events. A metric that is not finite is never better.
    """
    columns = searcher_events.c
    query = (
        select(columns.time, trials.c.id, columns.length, columns.value)
        .join(
            trials,
            (trials.c.experiment_id == columns.experiment_id)
            & (trials.c.request_id == columns.request_id),
        )
        .where(columns.experiment_id == experiment_id, columns.kind == "validated")
        .order_by(columns.id)
    )
    sign = 1.0 if smaller_is_better else -1.0
    best = math.inf
    found: list[Better] = []
    count = 0
    for row in connection.execute(query):
        count += 1
        value = row[3]
        if value is not None and math.isfinite(value) and sign * value < best:
            best = sign * value
            found.append(Better(*row))
    return found, count
