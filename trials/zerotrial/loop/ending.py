"""Why the loop of a trial ends."""

import enum

from zerolab.contract.spec import EXIT_PREEMPTED, EXIT_REACHED, EXIT_STALE

__all__ = ["Ending"]


class Ending(enum.IntEnum):
    """Why the loop ended; of several ranks' reasons the largest one counts."""

    FINISHED = 0
    STOP_REQUESTED = 1
    PREEMPTED = 2
    STALE = 3
    REACHED = 4

    @property
    def exit_code(self) -> int:
        """What tells the platform (:mod:`zerolab.contract.spec`)."""
        codes = {
            Ending.PREEMPTED: EXIT_PREEMPTED,
            Ending.STALE: EXIT_STALE,
            Ending.REACHED: EXIT_REACHED,
        }
        return codes.get(self, 0)
