"""One run on one rank: reporter, signal handlers and controller."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from zerolab.contract.outcome import CHECKPOINTED_EXITS, read_reason
from zerolab.contract.spec import RunSpec
from zerolab.core.preemption import DirectivePoller, SigtermFlag
from zerolab.reports.reporter import Reporter
from zerolab.storage.store import CheckpointStore
from zerotrial.context import ZeroTrialContext
from zerotrial.data import random_state
from zerotrial.loop.controller import Controller
from zerotrial.loop.settings import FitSettings
from zerotrial.loop.stop_reason import StopReason
from zerotrial.trial import ZeroTrial

__all__ = ["Session"]

logger = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 10.0  # the agent delivers the remaining reports later
_FLUSH_TIMEOUT_AFTER_FAILURE_S = 3.0


class Session:
    """Reporter and stop signals of a run, opened here and closed at its end.

    Raises:
        StorageError: On all ranks, if the checkpoint storage is not writable.
    """

    def __init__(self, context: ZeroTrialContext) -> None:
        spec: RunSpec = context.spec
        _probe_storage(context)
        self._context = context
        self._reporter: Reporter | None = None
        self._poller: DirectivePoller | SigtermFlag
        if context.distributed.is_chief:
            self._reporter = context.reporter = Reporter(spec)
            self._poller = DirectivePoller(spec, self._reporter.stale)
        else:
            self._poller = SigtermFlag()
        _exit_on_peer_failure(Path(spec.run_dir))

    def build_controller(
        self, make_trial: Callable[[ZeroTrialContext], ZeroTrial], settings: FitSettings
    ) -> Controller:
        """Build the trial under its seed, and its controller."""
        if self._reporter is not None:
            self._reporter.report_state("starting")
        random_state.seed_everything(self._context.get_trial_seed())
        trial = make_trial(self._context)
        return self.make_controller(trial, settings)

    def make_controller(self, trial: ZeroTrial, settings: FitSettings) -> Controller:
        """Make the controller of an existing trial."""
        return Controller(trial, self._context, settings, self._reporter, self._poller)

    def close(self, stop_reason: StopReason | None) -> None:
        """Flush the last reports and restore the signal handlers.

        Args:
            stop_reason: Why the loop ended; ``None`` after a failure.
        """
        self._context.close()
        self._context.reporter = None
        if isinstance(self._poller, DirectivePoller):
            self._poller.close()
        else:
            self._poller.restore()
        if self._reporter is not None:
            wait_s = _FLUSH_TIMEOUT_AFTER_FAILURE_S if stop_reason is None else _FLUSH_TIMEOUT_S
            if not self._reporter.close(wait_s):
                logger.info("some reports are not uploaded yet; the agent uploads them")


def _probe_storage(context: ZeroTrialContext) -> None:
    """Write to the checkpoint storage before training begins. **Collective**.

    Raises:
        StorageError: On all ranks, if the write fails on any machine.
    """
    spec, ranks = context.spec, context.distributed
    with ranks.together("the run cannot start"):
        if ranks.is_local_chief:
            CheckpointStore.of_run(spec).probe()


def _exit_on_peer_failure(run_dir: Path) -> None:
    """Let SIGTERM end this rank at once if another rank has failed.

    There is nothing to save then. A graceful exit would wait for a collective that never completes.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    previous = signal.getsignal(signal.SIGTERM)

    def handle(signum: int, frame: FrameType | None) -> None:
        reason = read_reason(run_dir)
        if reason is not None and reason.exit_code not in CHECKPOINTED_EXITS:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif callable(previous):
            previous(signum, frame)

    signal.signal(signal.SIGTERM, handle)
