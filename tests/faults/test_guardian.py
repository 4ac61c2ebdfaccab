"""Nothing that a test has started outlives it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.helpers import gone
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.parametrize("test", ["ranks_that_never_end", "a_daemon_and_its_child_that_never_end"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_test_has_started_ends_with_a_killed_pytest(
    test: str, end: signal.Signals, tmp_path: Path
) -> None:
    log, orphans = tmp_path / "log", tmp_path / "orphans"
    orphans.mkdir()
    with log.open("wb") as output:
        words = ["-m", "pytest", "-p", "no:cacheprovider", f"tests/faults/orphans.py::test_{test}"]
        pytest_process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, "ORPHANS": str(orphans)},
            stdout=output,
            stderr=output,
        )
    try:
        pids = until(
            "two processes have said who they are",
            lambda: [int(one.name) for one in orphans.iterdir()],
            lambda pids: len(pids) == 2 or pytest_process.poll() is not None,
            details=log.read_text,
        )
        assert len(pids) == 2, log.read_text()
    finally:
        pytest_process.send_signal(end)
    assert pytest_process.wait() == -end
    gone(*pids)
