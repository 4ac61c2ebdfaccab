"""Endless tests that test_guardian.py starts and kills; pytest does not collect this file."""

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


def test_endless_ranks() -> None:
    run_on_ranks(spin, 2, os.environ["ORPHANS"])


def test_endless_daemon_and_child() -> None:
    subprocess.run(["setsid", "--wait", "sh", "-c", DAEMON], check=True)
