"""Process that stages a run's data: ``... staging.process PARENT RUN_JSON FD``.

The run's launcher starts it and waits for it, and forks the ranks afterwards. The threads of
object-store libraries must not be forked, so they stay in this process.
"""

import contextlib
import os
import sys
import threading
from pathlib import Path

from zerolab.client.http import Client
from zerolab.contract.outcome import write_reason
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_PREEMPTED,
    EXIT_STALE,
    EXIT_USER_ERROR,
    RunSpec,
    StageSpec,
    read_run_spec,
)
from zerolab.core.preemption import DirectivePoller
from zerolab.errors import StorageError, ZerolabError, is_storage_failure
from zerolab.extensions.staging.copying import StagedCopy, StoppedError, Watch
from zerolab.extensions.staging.source import DataRefusedError, open_source
from zerolab.linux import die_with_parent

__all__ = ["main"]


class _ActivityReporter:
    """Thread that reports the newest activity to the server, without delaying the copy."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._text = ""
        self._new = threading.Event()
        if spec.master:
            threading.Thread(target=self._send, daemon=True).start()

    def __call__(self, text: str) -> None:
        self._text = text
        self._new.set()

    def _send(self) -> None:
        with Client(self._spec.master, self._spec.token) as client:
            while self._new.wait():
                self._new.clear()
                with contextlib.suppress(ZerolabError):  # the log contains it, too
                    client.run_activity(self._spec.run_id, self._text)


def main() -> int:
    """Stage the data; return 0, or an exit code after its reason has been written."""
    parent, spec_file, use = sys.argv[1:]
    die_with_parent(int(parent))
    spec = read_run_spec(Path(spec_file))
    assert spec.stage is not None
    poller = DirectivePoller(spec)
    try:
        _bring(spec, spec.stage, int(use), poller)
    except StoppedError:
        code = EXIT_STALE if poller.stale.is_set() else EXIT_PREEMPTED
        reason = "preempted while its data was staged"
    except DataRefusedError as error:
        code, reason = EXIT_USER_ERROR, str(error)
    except StorageError as error:
        code, reason = EXIT_INFRASTRUCTURE, str(error)
    except OSError as error:
        code = EXIT_INFRASTRUCTURE if is_storage_failure(error) else EXIT_USER_ERROR
        reason = f"data.stage: {error}"
    else:
        return 0
    write_reason(spec.run_dir, code, reason)
    return code


def _bring(spec: RunSpec, stage: StageSpec, use: int, poller: DirectivePoller) -> None:
    folder = RunFolder(Path(spec.run_dir))
    at = "" if spec.nodes is None else f"node {spec.nodes.rank}: "
    watch = Watch(
        say=lambda text: folder.log(f"{at}{text}"),
        show=_ActivityReporter(spec),
        stopped=lambda: poller.should_preempt,
    )
    copy = StagedCopy(stage.target_dir(spec.trial_id))
    copy.bring(stage.source, open_source(stage.source), use, watch)


if __name__ == "__main__":
    os.umask(0o077)
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a normal exit would wait for threads of object-store libraries
