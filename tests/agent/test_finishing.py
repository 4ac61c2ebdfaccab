"""Delivery of a run's outcome to the server, with retries."""

import logging
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.helpers import KillableServer, make_runs
from tests.waiting import until
from zerolab.agent.run import finish_run
from zerolab.client.http import Client
from zerolab.contract.outcome import Outcome, write_outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import RunSpec

pytestmark = pytest.mark.processes


def ended_run(spec: RunSpec, code: int) -> RunFolder:
    folder = RunFolder(Path(spec.run_dir))
    folder.create()
    write_outcome(folder.path, Outcome(code))
    return folder


def sql(server: KillableServer, statement: str) -> None:
    connection = sqlite3.connect(server.home.database, timeout=60)
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_exit_report_is_retried(
    server: KillableServer, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    folder = ended_run(spec, 0)
    sql(
        server,
        "CREATE TRIGGER broken BEFORE UPDATE ON runs WHEN NEW.state = 'EXITED' "
        "BEGIN SELECT RAISE(ABORT, 'broken'); END",
    )
    closing = threading.Event()
    with ThreadPoolExecutor() as pool:
        finishing = pool.submit(finish_run, folder, spec.run_id, client, closing)
        until("it was refused", lambda: "the server failed (500)" in caplog.text)
        assert not folder.delivered.exists()
        closing.set()
        assert not finishing.result()
        assert not folder.delivered.exists()
        sql(server, "DROP TRIGGER broken")
        assert finish_run(folder, spec.run_id, client, closing)
    assert folder.delivered.exists()
    assert client.trial(spec.trial_id)["state"] == "COMPLETED"


def test_exit_report_of_unknown_run_is_dropped(
    server: KillableServer, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    folder = ended_run(spec, 0)
    with caplog.at_level(logging.INFO):
        assert finish_run(folder, 999, client, threading.Event())
    assert folder.delivered.exists()
    assert "the server rejected the outcome" in caplog.text
