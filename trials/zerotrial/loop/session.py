"""One run on one rank: its reports, its signals, its trial, from beginning to end."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from zerolab.contract.outcome import LEAVING, read_reason
from zerolab.contract.spec import RunSpec
from zerolab.core.preemption import DirectivePoller, SigtermFlag
from zerolab.reports.reporter import Reporter
from zerolab.storage.store import CheckpointStore
from zerotrial.context import ZeroTrialContext
from zerotrial.data import random_state
from zerotrial.loop.controller import Controller
from zerotrial.loop.settings import FitSettings
from zerotrial.loop.stop_reason import Ending
from zerotrial.trial import ZeroTrial

__all__ = ["Session"]

logger = logging.getLogger(__name__)

_LAST_REPORTS_S = 10.0  # the agent delivers what is left after that
_LAST_REPORTS_AFTER_FAILURE_S = 3.0


class Session:
    """Opens the reports of a run and listens for its end; closes both.

    Args:
        context: Of the trial.

    Raises:
        StorageError: On all ranks, if the checkpoint storage cannot be written.
    """

    def __init__(self, context: ZeroTrialContext) -> None:
        spec: RunSpec = context.spec
        _try_storage(context)
        self._context = context
        self._reporter: Reporter | None = None
        self._poller: DirectivePoller | SigtermFlag
        if context.distributed.is_chief:
            self._reporter = Reporter(spec)
            self._poller = DirectivePoller(spec, self._reporter.stale)
        else:
            self._poller = SigtermFlag()
        _die_after_another_rank(Path(spec.run_dir))

    def build(
        self, make_trial: Callable[[ZeroTrialContext], ZeroTrial], settings: FitSettings
    ) -> Controller:
        """Make the trial and all that it is run by, under the trial's seed."""
        if self._reporter is not None:
            self._reporter.report_state("starting")
        random_state.seed_everything(self._context.get_trial_seed())
        trial = make_trial(self._context)
        return self.control(trial, settings)

    def control(self, trial: ZeroTrial, settings: FitSettings) -> Controller:
        """Make the controller of a trial that is there already."""
        return Controller(trial, self._context, settings, self._reporter, self._poller)

    def close(self, ending: Ending | None) -> None:
        """Ship the last reports and let signals mean again what they meant.

        Args:
            ending: Why the loop ended; ``None`` after a failure.
        """
        self._context.close()
        if isinstance(self._poller, DirectivePoller):
            self._poller.close()
        else:
            self._poller.restore()
        if self._reporter is not None:
            wait_s = _LAST_REPORTS_AFTER_FAILURE_S if ending is None else _LAST_REPORTS_S
            if not self._reporter.close(wait_s):
                logger.info("some reports are still on disk; they are delivered later")


def _try_storage(context: ZeroTrialContext) -> None:
    """Write to the checkpoint storage before hours go into what could not be saved. **Collective**.

    Raises:
        StorageError: On all ranks, if that fails on a machine.
    """
    spec, ranks = context.spec, context.distributed
    with ranks.together("the run cannot begin"):
        if ranks.is_local_chief:
            CheckpointStore.of_run(spec).probe()


def _die_after_another_rank(run_dir: Path) -> None:
    """Let SIGTERM end this rank at once when another one has failed: there is nothing to save.

    Otherwise a rank that hangs, and is why the other one failed, would be waited for.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        said = read_reason(run_dir)
        if said is not None and said.exit_code not in LEAVING:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, end)
