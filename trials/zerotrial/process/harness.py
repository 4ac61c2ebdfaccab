"""One rank of a trial: ``python -m zerotrial.process.harness``, started by the launcher.

It reads the specification that ``ZEROLAB_RUN_SPEC`` names, builds the user's trial and runs its
loop. The exit code reports the result (:mod:`zerolab.contract.spec`).
"""

import _thread
import contextlib
import faulthandler
import logging
import os
import sys
import time
from pathlib import Path

import torch

from zerolab.config.experiment.run_overrides import apply_run_overrides
from zerolab.contract.hparam_reads import warn_of_unread
from zerolab.contract.outcome import write_reason
from zerolab.contract.spec import ENV_RUN_SPEC, RunSpec, TrialClass, read_run_spec
from zerolab.errors import ConfigError, TrialError
from zerotrial.context import ZeroTrialContext
from zerotrial.failures import exit_code_of, reason_of
from zerotrial.loop.session import Session
from zerotrial.loop.settings import FitSettings
from zerotrial.loop.stop_reason import StopReason
from zerotrial.process.entrypoint import load_trial_class
from zerotrial.ranks import Distributed, is_peer_failure

__all__ = ["main", "run"]

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 60.0


def main() -> int:
    """Run this rank.

    Returns:
        The exit code.
    """
    if ENV_RUN_SPEC not in os.environ:
        print(f"{ENV_RUN_SPEC} is not set: the launcher starts this program", file=sys.stderr)  # noqa: T201 - usage
        return 2
    faulthandler.enable()
    spec = read_run_spec(Path(os.environ[ENV_RUN_SPEC]))
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        force=True,
        format="%(levelname)s %(name)s: %(message)s",  # the log shipper adds rank and time
    )
    code = run(spec)
    _force_exit(code)
    return code


def run(spec: RunSpec) -> int:
    """Run this rank's part of a run.

    Returns:
        The exit code.
    """
    os.chdir(spec.model_dir)
    rank = _RankRun(spec)
    try:
        return rank.run().exit_code
    except Exception as error:
        code = exit_code_of(error, building=rank.building)
        reason = reason_of(error, Path(spec.model_dir))
        if is_peer_failure(error) and "imed out" not in reason:
            # Without a traceback, which would hide that of the rank that failed.
            logger.error("this rank lost another one and exits: %s", reason)  # noqa: TRY400
        else:
            logger.exception("the trial failed; this rank exits with code %d", code)
        number = int(os.environ.get("RANK", "0")) if spec.slots > 1 else None
        write_reason(spec.run_dir, code, reason, number)
        return code


class _RankRun:
    """One rank's run; records whether the trial was built, which classifies a failure."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self.building = True

    def run(self) -> StopReason:
        spec = self._spec
        if spec.config.get("backend") == "deepspeed":  # submitted before this key was removed
            from zerolab.config.experiment.experiment_config import REMOVED_BACKEND

            raise ConfigError("experiment", [f"backend: is not supported; {REMOVED_BACKEND}"])
        if spec.fit is None or not isinstance(spec.entrypoint, TrialClass):
            raise TrialError(f"entrypoint: must be module:Class, got {spec.entrypoint}")
        settings = FitSettings.from_spec(spec.fit, test_mode=spec.test_mode)
        trial_class = load_trial_class(spec.entrypoint, Path(spec.model_dir))
        distributed = Distributed.from_environment(cuda=torch.cuda.is_available())
        session = Session(ZeroTrialContext(spec, distributed))
        stop_reason = None
        try:
            with apply_run_overrides(spec):
                controller = session.build_controller(trial_class, settings)
            self.building = False
            stop_reason = controller.run()
        finally:
            session.close(stop_reason)
        if distributed.is_chief and stop_reason not in (StopReason.PREEMPTED, StopReason.STALE):
            warn_of_unread(spec)
        if stop_reason is not StopReason.STALE:
            distributed.close()
        return stop_reason


def _force_exit(code: int) -> None:
    """Exit with ``code`` after a timeout even if a thread of the user's code is still running."""

    def exit_later() -> None:
        time.sleep(_EXIT_TIMEOUT_S)
        os._exit(code)

    # Thread.start() waits for the new thread forever if that finds no memory, as after an
    # allocation that failed at a limit of the process.
    with contextlib.suppress(RuntimeError, MemoryError):
        _thread.start_new_thread(exit_later, ())


if __name__ == "__main__":
    sys.exit(main())
