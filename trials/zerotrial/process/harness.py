"""One rank of a trial: ``python -m zerotrial.process.harness``, started by the launcher.

It reads the run that ``ZEROLAB_RUN_SPEC`` names, builds the user's trial, runs its loop, and tells
by its exit code how that ended (:mod:`zerolab.contract.spec`).
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from pathlib import Path

import torch

from zerolab.config.experiment.run_overrides import determined_by_run
from zerolab.contract.hparam_reads import warn_of_unread
from zerolab.contract.outcome import write_reason
from zerolab.contract.spec import ENV_RUN_SPEC, RunSpec, TrialClass, read_run_spec
from zerolab.errors import ConfigError, TrialError
from zerotrial.context import ZeroTrialContext
from zerotrial.failures import exit_code_of, reason_of
from zerotrial.loop.session import Session
from zerotrial.loop.settings import FitSettings
from zerotrial.loop.stop_reason import Ending
from zerotrial.process.entrypoint import load_trial_class
from zerotrial.ranks import Distributed

__all__ = ["main", "run"]

logger = logging.getLogger(__name__)

_LONGEST_EXIT_S = 60.0


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
        format="%(levelname)s %(name)s: %(message)s",  # rank and time are told beside each line
    )
    code = run(spec)
    _end_for_certain(code)
    return code


def run(spec: RunSpec) -> int:
    """Run this rank's part of a run.

    Returns:
        The exit code.
    """
    os.chdir(spec.model_dir)
    rank = _Rank(spec)
    try:
        return rank.run().exit_code
    except Exception as error:
        code = exit_code_of(error, building=rank.building)
        logger.exception("the trial ends with code %d", code)
        number = int(os.environ.get("RANK", "0")) if spec.slots > 1 else None
        write_reason(spec.run_dir, code, reason_of(error, Path(spec.model_dir)), number)
        return code


class _Rank:
    """Knows how far it got, which decides what a failure means."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self.building = True

    def run(self) -> Ending:
        spec = self._spec
        if spec.config.get("backend") == "deepspeed":  # submitted before this key was removed
            from zerolab.config.experiment.refused import REMOVED_BACKEND

            raise ConfigError("experiment", [f"backend: is not supported; {REMOVED_BACKEND}"])
        if spec.fit is None or not isinstance(spec.entrypoint, TrialClass):
            raise TrialError(f"entrypoint: must be module:Class, got {spec.entrypoint}")
        settings = FitSettings.from_spec(spec.fit, test_mode=spec.test_mode)
        trial_class = load_trial_class(spec.entrypoint, Path(spec.model_dir))
        distributed = Distributed.from_environment(cuda=torch.cuda.is_available())
        session = Session(ZeroTrialContext(spec, distributed))
        ending = None
        try:
            with determined_by_run(spec):
                controller = session.build(trial_class, settings)
            self.building = False
            ending = controller.run()
        finally:
            session.close(ending)
        if distributed.is_chief:
            warn_of_unread(spec)
        if ending is not Ending.STALE:
            distributed.close()
        return ending


def _end_for_certain(code: int) -> None:
    """End the process with ``code`` even if a thread of the user's code would keep it alive."""

    def end() -> None:
        time.sleep(_LONGEST_EXIT_S)
        os._exit(code)

    threading.Thread(target=end, name="zerolab-exit", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
