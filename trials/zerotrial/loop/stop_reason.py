"""Reasons to stop a trial's loop, and the signals that a rank watches."""

import enum

from zerolab.contract.spec import EXIT_PREEMPTED, EXIT_REACHED, EXIT_STALE
from zerolab.core.preemption import DirectivePoller, SigtermFlag
from zerotrial.context import ZeroTrialContext

__all__ = ["Ending", "StopReason", "StopSignals"]


class StopReason(enum.IntEnum):
    """Reason why the loop ended; the largest of all ranks' reasons applies.

    ``STOP_REQUESTED``: the trial requested it. ``PREEMPTED``: the server needs the slots, or paused
    or stopped the trial. ``STALE``: another run has taken over. ``REACHED``: the trial reached the
    length at which the searcher compares it with others.

    Example:
        >>> zerotrial.StopReason.FINISHED == 0
        True
    """

    FINISHED = 0
    """It trained to its end. In messages between ranks, 0 means no reason to stop."""
    STOP_REQUESTED = 1
    PREEMPTED = 2
    STALE = 3
    REACHED = 4

    @property
    def exit_code(self) -> int:
        """Exit code that reports the reason to the platform (:mod:`zerolab.contract.spec`)."""
        codes = {
            StopReason.PREEMPTED: EXIT_PREEMPTED,
            StopReason.STALE: EXIT_STALE,
            StopReason.REACHED: EXIT_REACHED,
        }
        return codes.get(self, 0)


Ending = StopReason
"""Former name of :class:`StopReason`."""


class StopSignals:
    """Sources of stop requests on one rank; the ranks then agree on one reason.

    Args:
        context: The trial's context.
        poller: Source of preemption requests; the SIGTERM flag on ranks other than the chief.
    """

    def __init__(
        self, context: ZeroTrialContext, poller: DirectivePoller | SigtermFlag | None
    ) -> None:
        self._context = context
        self._poller = poller

    def current(self) -> StopReason | None:
        """Return the reason to stop after this batch; None to continue."""
        poller = self._poller
        if isinstance(poller, DirectivePoller):
            if poller.stale.is_set():
                return StopReason.STALE
            if poller.should_preempt:
                return StopReason.PREEMPTED
        elif poller:
            return StopReason.PREEMPTED
        return StopReason.STOP_REQUESTED if self._context.get_stop_requested() else None

    def interrupt_reason(self) -> int:
        """Return the reason to interrupt a validation; a stop that the trial requested waits.

        Returns:
            A :class:`StopReason`, or 0 to continue.
        """
        reason = self.current() or 0
        return reason if reason >= StopReason.PREEMPTED else 0

    @property
    def cause(self) -> str | None:
        """Why the server asked the run to exit, such as "canceled"; None if it gave no cause."""
        poller = self._poller
        return poller.directive.cause if isinstance(poller, DirectivePoller) else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the run is killed; None if there is no limit."""
        return self._poller.seconds_left if isinstance(self._poller, DirectivePoller) else None
