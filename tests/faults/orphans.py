"""Tests that are started to be killed, by test_guardian.py; pytest does not find them by itself."""

import os
import subprocess
from pathlib import Path

from tests.engine.ranks import run_on_ranks

DAEMON = """
setsid sh -c 'touch "$ORPHANS/$$"; exec sleep 10000' &
touch "$ORPHANS/$$"; exec sleep 10000
"""


def spin(directory: str) -> None:
    Path(directory, str(os.getpid())).touch()
    while True:
        pass


def test_ranks_that_never_end() -> None:
    run_on_ranks(spin, 2, os.environ["ORPHANS"])


def test_a_daemon_and_its_child_that_never_end() -> None:
    subprocess.run(["setsid", "--wait", "sh", "-c", DAEMON], check=True)
