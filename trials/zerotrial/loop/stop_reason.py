"""Why the loop of a trial ends, and what a rank wishes."""

import enum

from zerolab.contract.spec import EXIT_PREEMPTED, EXIT_REACHED, EXIT_STALE
from zerolab.core.preemption import DirectivePoller, SigtermFlag
from zerotrial.context import ZeroTrialContext

__all__ = ["Ending", "Wishes"]


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


class Wishes:
    """What one rank wishes: to go on, or to end and why; the ranks agree on what is done.

    Args:
        context: Of the trial.
        poller: Tells when to stop; on ranks other than the chief the flag of SIGTERM.
    """

    def __init__(
        self, context: ZeroTrialContext, poller: DirectivePoller | SigtermFlag | None
    ) -> None:
        self._context = context
        self._poller = poller

    def now(self) -> Ending:
        """Why to end after this batch; ``FINISHED`` where there is no reason."""
        poller = self._poller
        if isinstance(poller, DirectivePoller):
            if poller.stale.is_set():
                return Ending.STALE
            if poller.should_preempt:
                return Ending.PREEMPTED
        elif poller:
            return Ending.PREEMPTED
        return Ending.STOP_REQUESTED if self._context.get_stop_requested() else Ending.FINISHED

    def to_interrupt(self) -> Ending:
        """What ends a validation at once; what the trial itself asks for waits until it is over."""
        wish = self.now()
        return wish if wish >= Ending.PREEMPTED else Ending.FINISHED

    @property
    def seconds_left(self) -> float | None:
        """Time until the run is killed, in seconds; None when there is no limit."""
        return self._poller.seconds_left if isinstance(self._poller, DirectivePoller) else None
