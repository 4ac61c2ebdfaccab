"""Launchers that are stopped before they start a rank have an outcome."""

import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from tests.launcher.helpers import catches_sigterm, code_of, end_of, make_run
from tests.waiting import DEADLINE_S, until
from zerolab.contract.messages import RunExit
from zerolab.contract.outcome import Outcome, read_outcome
from zerolab.contract.spec import EXIT_PREEMPTED, Nodes, read_run_spec, write_run_spec
from zerolab.launcher.local import ForkServer
from zerolab.launcher.process import start_launcher

pytestmark = pytest.mark.processes

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
EARLY = "the run was stopped by SIGTERM before its ranks started"


def test_sigterm_during_torch_import(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "print('began')", entrypoint="script:Trial")
    process = start_launcher(folder, ENVIRONMENT)
    until("it notes SIGTERM", lambda: catches_sigterm(process.pid))
    os.kill(process.pid, signal.SIGTERM)
    assert end_of(process, folder) == Outcome(EXIT_PREEMPTED, EARLY, was_stopped=True)
    assert not folder.rank_pids()


def test_sigterm_to_new_forked_launcher(tmp_path: Path) -> None:
    server = ForkServer(tmp_path / "log")
    try:
        for number in range(5):
            folder = make_run(tmp_path / f"run-{number}", "import signal; signal.pause()", slots=1)
            process = server.start(folder, ENVIRONMENT, timeout_s=DEADLINE_S)
            os.kill(process.pid, signal.SIGTERM)
            end = end_of(process, folder)
            assert end.was_stopped, end
            assert str(end.reason).startswith("the run was stopped by SIGTERM"), end
    finally:
        server.close()


def test_sigterm_while_waiting_for_machine(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "print('began')")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a machine that never answers
        silent.settimeout(DEADLINE_S)
        nodes = Nodes((1, 1), 1, "127.0.0.1", silent.getsockname()[1])
        spec = msgspec.structs.replace(read_run_spec(folder.spec), nodes=nodes)
        write_run_spec(spec, folder.spec)
        process = start_launcher(folder, ENVIRONMENT)
        connection, _ = silent.accept()
        with connection:
            assert not catches_sigterm(process.pid)
            os.kill(process.pid, signal.SIGTERM)
            assert code_of(process) == -signal.SIGTERM
    assert read_outcome(folder.path) is None


def test_stopped_outcome_keeps_its_wire_name() -> None:
    # Other versions of the agent, the server and the launchers read it.
    assert msgspec.json.decode(msgspec.json.encode(RunExit(0, was_stopped=True)))["told"] is True
    assert msgspec.json.decode(b'{"exit_code": 1, "told": true}', type=Outcome).was_stopped
