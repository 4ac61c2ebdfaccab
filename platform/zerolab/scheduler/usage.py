"""Recent usage of the slots of each pool by user, on which fair share between users depends."""

from collections.abc import Iterable, Mapping
from math import exp, log

import msgspec

from zerolab.scheduler.types import Account, Allocation

__all__ = ["HALF_LIFE_S", "RecentUsage", "held_by_account", "recent"]

HALF_LIFE_S = 4 * 3600.0
"""Seconds after which usage counts half."""
_DECAY = log(2) / HALF_LIFE_S
_FORGOTTEN = 1e-3
"""Usage in slot-seconds that is no longer kept."""


def recent(slots: int, start: float, end: float, now: float) -> float:
    """Return the recent usage, in slot-seconds, of slots that were held for a while.

    Args:
        slots: Number of slots.
        start: Time at which they were assigned, in seconds.
        end: Time at which they were released.
        now: Time of the result; usage counts half after :data:`HALF_LIFE_S`.
    """
    end = min(end, now)
    start = min(start, end)
    return slots * (exp(_DECAY * (end - now)) - exp(_DECAY * (start - now))) / _DECAY


def held_by_account(allocations: Iterable[Allocation]) -> dict[Account, int]:
    """Return the number of slots that each user holds in each pool."""
    held: dict[Account, int] = {}
    for run in allocations:
        number = sum(map(len, run.slots.values()))
        held[run.job.account] = held.get(run.job.account, 0) + number
    return held


class RecentUsage(msgspec.Struct, frozen=True):
    """Recent usage at a moment, and the slots held since then."""

    at: float
    """Time in seconds."""
    slot_seconds: Mapping[Account, float]
    """Recent usage of the slots of a pool by a user."""
    held: Mapping[Account, int]
    """Slots that the user holds since ``at``."""

    def advance(self, now: float) -> "RecentUsage":
        """Return the usage at a later time, with the same slots held."""
        if now <= self.at:
            return self
        factor = exp(_DECAY * (self.at - now))
        usage = {
            account: decayed
            for account, value in self.slot_seconds.items()
            if (decayed := value * factor) > _FORGOTTEN
        }
        for account, slots in self.held.items():
            usage[account] = usage.get(account, 0.0) + recent(slots, self.at, now, now)
        return RecentUsage(now, usage, self.held)
