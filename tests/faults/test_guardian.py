"""Guardian: processes of tests do not outlive pytest."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.helpers import wait_for_exit
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.parametrize("test", ["endless_ranks", "endless_daemon_and_child"])
@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_killed_pytest_leaves_no_processes(
    test: str, signum: signal.Signals, tmp_path: Path
) -> None:
    log, orphans = tmp_path / "log", tmp_path / "orphans"
    orphans.mkdir()
    with log.open("wb") as output:
        arguments = [
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"tests/faults/orphans.py::test_{test}",
        ]
        pytest_process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "ORPHANS": str(orphans)},
            stdout=output,
            stderr=output,
        )
    try:
        pids = until(
            "two processes have written their ids",
            lambda: [int(file.name) for file in orphans.iterdir()],
            lambda pids: len(pids) == 2 or pytest_process.poll() is not None,
            details=log.read_text,
        )
        assert len(pids) == 2, log.read_text()
    finally:
        pytest_process.send_signal(signum)
    assert pytest_process.wait() == -signum
    wait_for_exit(*pids)
