"""Backfill: slots usable without delaying queued jobs, exact and without runtime estimates.

A waiting trial that needs ``need`` units (slots of an agent, slots under a quota) starts as soon as
the free units and the returned ones reach that number. The order in which runs end is unknown, so
any sum of their holdings may be the decisive one. The smallest sufficient sum leaves the fewest
units over. That surplus can be used by later jobs permanently: whatever the order of the ends, the
waiting trial starts at the same moment.
"""

from collections.abc import Iterable

__all__ = ["backfill_limit"]


def backfill_limit(free: int, holdings: Iterable[int], need: int, guaranteed: int = 0) -> int:
    """Return how many free units later jobs may use without delaying a waiting trial.

    Args:
        free: Free units.
        holdings: Units of each run, returned all at once.
        need: Units that the waiting trial needs at once.
        guaranteed: Held units that are returned before it can start in any case, because it also
            waits for something else.

    Returns:
        At most ``free``; all of them if ``need`` can never be met here.
    """
    missing = need - free
    sums = 1  # bit n: a subset of the holdings sums to n units
    for units in holdings:
        sums |= sums << units
    minimum = max(missing, guaranteed, 0)
    sufficient = sums >> minimum
    if not sufficient:
        return free
    # The lowest set bit is the smallest sum that suffices.
    returned = minimum + (sufficient & -sufficient).bit_length() - 1
    return min(free, returned - missing)
