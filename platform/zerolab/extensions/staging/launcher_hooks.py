"""Staging of a run's data: copy it, keep it locked, and remove it afterwards."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from zerolab.contract.outcome import Outcome, read_reason
from zerolab.contract.spec import ENV_STAGED, EXIT_PREEMPTED, EXIT_USER_ERROR, RunSpec
from zerolab.extensions.staging.section import stage_problems, stage_spec

__all__ = ["stage_problems", "stage_spec", "staged"]


@contextlib.contextmanager
def staged(spec: RunSpec, spec_file: Path) -> Iterator[Outcome | None]:
    """Stage a run's data, and hold it with :data:`ENV_STAGED` set until the block ends.

    SIGTERM during staging stops it and ends the run as preempted.

    Args:
        spec: Spec of the run; nothing happens without a stage block.
        spec_file: File that holds the same spec.

    Yields:
        None when the ranks may start, otherwise the outcome of the run.
    """
    if spec.stage is None:
        yield None
        return
    from zerolab.extensions.staging.copying import StagedCopy  # not to check a file

    copy = StagedCopy(spec.stage.target_dir(spec.trial_id))
    try:
        lock = copy.open_use()
    except OSError as error:
        detail = error.strerror or error
        text = (
            f"data.stage.to: {copy.target.parent} cannot be written: {detail}; "
            "use another directory"
        )
        yield Outcome(EXIT_USER_ERROR, text)
        return
    try:
        with lock:
            outcome = _run(spec, spec_file, lock.fileno())
            os.environ[ENV_STAGED] = str(copy.target)
            yield outcome
    finally:
        if spec.stage.per_trial:
            copy.remove()


def _run(spec: RunSpec, spec_file: Path, lock: int) -> Outcome | None:
    """Run the staging process; return the outcome of the run if staging failed."""
    command = [sys.executable, "-P", "-m", "zerolab.extensions.staging.process"]
    process = subprocess.Popen(
        [*command, str(os.getpid()), str(spec_file), str(lock)],
        stdin=subprocess.DEVNULL,
        pass_fds=[lock],
    )

    signals: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        process.send_signal(number)

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, previous)
    if code == 0:
        return None
    reason = read_reason(Path(spec.run_dir))
    if reason is None and signals:  # SIGTERM before the process could handle it
        return Outcome(EXIT_PREEMPTED, "preempted before its data was staged")
    return reason or Outcome(code, f"the data could not be staged: exit code {code}; see the log")
