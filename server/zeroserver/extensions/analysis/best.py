"""Best validation so far over time."""

import math
from typing import NamedTuple

from sqlalchemy import Connection, select

from zeroserver.store.schema import searcher_events, trials

__all__ = ["BestSoFar", "best_so_far"]


class BestSoFar(NamedTuple):
    """Validation that is better than all previous ones."""

    time: float
    """Time at which the searcher received it, in seconds since 1970."""
    trial_id: int
    length: float | None
    """Length of the trial at that time, in the searcher's unit."""
    value: float


def best_so_far(
    connection: Connection, experiment_id: int, *, smaller_is_better: bool
) -> tuple[list[BestSoFar], int]:
    """Return the validations better than all previous ones, and the number of all validations.

    Runs one query along the index of the searcher's events. A non-finite metric is never better.
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
    improvements: list[BestSoFar] = []
    count = 0
    for row in connection.execute(query):
        count += 1
        value = row[3]
        if value is not None and math.isfinite(value) and sign * value < best:
            best = sign * value
            improvements.append(BestSoFar(*row))
    return improvements, count
