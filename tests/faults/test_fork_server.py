"""A forked process writes and exits like one that was started."""

import sys
from pathlib import Path

import pytest

from tests.faults.fork_server import ForkServer

pytestmark = pytest.mark.processes


def print_and_exit(code: int | None) -> None:
    print("printed")
    sys.exit(code)


def test_child_writes_output_and_exits_with_its_code(tmp_path: Path) -> None:
    with ForkServer(log=tmp_path / "fork_server.log") as fork_server:
        for code in (None, 0, 2):
            log = tmp_path / f"{code}.log"
            pid = fork_server.start(f"{__name__}:{print_and_exit.__name__}", code, log=log)
            assert fork_server.wait(pid) == (code or 0)
            assert log.read_text() == "printed\n"
