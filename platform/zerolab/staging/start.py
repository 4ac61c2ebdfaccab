"""What the launcher of a node does about the data of a run: stage it, hold it, give it back."""

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
from zerolab.staging.copying import Copy

__all__ = ["staged"]


@contextlib.contextmanager
def staged(spec: RunSpec, spec_file: Path) -> Iterator[Outcome | None]:
    """Have the data of a run on this node until the block ends, and :data:`ENV_STAGED` set.

    SIGTERM that comes meanwhile ends the staging, and the run as preempted.

    Args:
        spec: Of the run; nothing happens when it stages nothing.
        spec_file: The same, as a file.

    Yields:
        None when the ranks may start, else how the run has ended.
    """
    if spec.stage is None:
        yield None
        return
    copy = Copy(spec.stage.place(spec.trial_id))
    try:
        use = copy.open_use()
    except OSError as error:
        why = error.strerror or error
        text = f"data.stage.to: {copy.target.parent} cannot be written: {why}; name another place"
        yield Outcome(EXIT_USER_ERROR, text)
        return
    try:
        with use:
            ended = _run(spec, spec_file, use.fileno())
            os.environ[ENV_STAGED] = str(copy.target)
            yield ended
    finally:
        if spec.stage.per_trial:
            copy.remove()


def _run(spec: RunSpec, spec_file: Path, use: int) -> Outcome | None:
    """Let a process stage the data; return how the run has ended when it could not."""
    words = [sys.executable, "-P", "-m", "zerolab.staging.process"]
    process = subprocess.Popen(
        [*words, str(os.getpid()), str(spec_file), str(use)],
        stdin=subprocess.DEVNULL,
        pass_fds=[use],
    )

    told: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        told.append(number)
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    if code == 0:
        return None
    said = read_reason(Path(spec.run_dir))
    if said is None and told:  # it came before the process could heed it
        return Outcome(EXIT_PREEMPTED, "told to leave before its data was staged")
    return said or Outcome(code, f"the data could not be staged: exit code {code}; see the log")
