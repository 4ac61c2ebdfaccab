"""Reports that returned are stored exactly once, even if reporter or server is killed."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.fork_server import ForkServer
from tests.faults.helpers import KillableServer, make_runs, stored_points
from tests.faults.reporter import Ledger, value_of
from tests.waiting import until
from zerolab.client.http import Client
from zerolab.contract.spec import RunSpec, write_run_spec
from zerolab.errors import UnreachableError
from zerolab.reports.reporter import SPOOL_DIR
from zerolab.reports.sender import deliver
from zerolab.reports.spool import Spool

pytestmark = pytest.mark.processes

RUNS = 8


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[ForkServer]:
    modules = ("zeroserver.process", "tests.faults.helpers", "tests.faults.reporter")
    with ForkServer(*modules, log=tmp_path / "fork_server.log") as fork_server:
        yield fork_server


@pytest.fixture
def server(fork_server: ForkServer, tmp_path: Path) -> KillableServer:
    server = KillableServer(fork_server, tmp_path / "home")
    server.start()
    return server


class ReportingRun:
    """One run and its reporter, which is restarted after each kill."""

    def __init__(self, fork_server: ForkServer, spec: RunSpec) -> None:
        self.spec = spec
        self.run_dir = Path(spec.run_dir)
        self.ledger = Ledger(self.run_dir / "ledger")
        self.certain: set[int] = set()
        self.uncertain: set[int] = set()
        self.pid = 0
        self._fork_server = fork_server
        write_run_spec(spec, self.run_dir / "run.json")

    def start(self, first: int, pause_s: float) -> None:
        arguments = [str(self.run_dir / "run.json"), str(self.run_dir / "ledger"), first, pause_s]
        self.pid = self._fork_server.start("tests.faults.reporter:report", *arguments)

    def run_and_kill(self, first: int, life_s: float) -> int:
        """Report from ``first`` on, then kill the reporter; return the next first step."""
        self.start(first, pause_s=0.0002)
        until("the first report has returned", lambda: self.ledger.step >= first)
        time.sleep(life_s)  # a random moment, not a wait
        assert self._fork_server.kill(self.pid) == -9
        last = self.ledger.step
        self.certain.update(range(first, last + 1))
        self.uncertain.add(last + 1)  # killed during this report, or just before or after it
        return last + 2

    def deliver_remaining(self, client: Client) -> int:
        """Deliver the remaining records, as the agent does; return the last stored number."""
        return until(
            "the server accepts the remaining records",
            lambda: deliver(self.run_dir, client, self.spec.run_id),
            not_yet=UnreachableError,  # it may be busy
        )


@pytest.mark.parametrize("lives", [4, pytest.param(25, marks=pytest.mark.soak)])
def test_kills_of_reporters_keep_each_report_once(
    fork_server: ForkServer, server: KillableServer, tmp_path: Path, lives: int
) -> None:
    runs = [ReportingRun(fork_server, spec) for spec in make_runs(server, RUNS, tmp_path / "runs")]
    chance = random.Random(1)
    lengths_s = [[chance.uniform(0, 0.08) for _ in range(lives)] for _ in runs]

    def run_lives(run: ReportingRun, lengths: list[float]) -> None:
        first = 1
        for length in lengths:
            first = run.run_and_kill(first, length)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run_lives, runs, lengths_s))
    with server.client as client:
        for run in runs:
            spec = run.spec
            count = run.deliver_remaining(client)
            assert count == Spool(run.run_dir / SPOOL_DIR).count
            points = stored_points(client, spec)
            assert run.certain <= set(points) <= run.certain | run.uncertain
            assert len(points) == count  # one record per step: no duplicates
            assert all(value == value_of(spec, step) for step, value in points.items())
            assert run.deliver_remaining(client) == count
            assert stored_points(client, spec) == points
    assert "Traceback" not in fork_server.log.read_text()


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.soak)])
def test_kills_of_server_keep_each_report_once(
    fork_server: ForkServer, server: KillableServer, tmp_path: Path, kills: int
) -> None:
    runs = [ReportingRun(fork_server, spec) for spec in make_runs(server, RUNS, tmp_path / "runs")]
    for run in runs:
        run.start(1, pause_s=0.004)
    chance = random.Random(2)
    for number in range(kills):
        if number % 2:
            time.sleep(chance.uniform(0, 0.4))  # killed during or shortly after the start
        else:
            until("the server answers", server.answers)
            _wait_for_reports(server, chance.choice(runs).spec)
            time.sleep(chance.uniform(0, 0.1))
        server.kill()
        server.start(wait=False)
    until("the server answers", server.answers)
    for run in runs:
        run.ledger.stop = True
    for run in runs:
        assert fork_server.wait(run.pid) == 0
    with server.client as client:
        for run in runs:
            points = stored_points(client, run.spec)
            assert set(points) == set(range(1, run.ledger.step + 1))
            assert all(value == value_of(run.spec, step) for step, value in points.items())
            count = run.deliver_remaining(client)
            assert len(points) == count  # one record per step: no duplicates


def _wait_for_reports(server: KillableServer, spec: RunSpec) -> None:
    with server.client as client:
        previous_steps = client.trial(spec.trial_id)["steps_completed"]
        until(
            "more reports are stored",
            lambda: client.trial(spec.trial_id),
            lambda trial: trial["steps_completed"] > previous_steps,
        )
