import http.server
import logging
import threading
from pathlib import Path

import pytest

from tests.client.helpers import closed_port, make_spec
from tests.faults.helpers import KillableServer, make_runs
from tests.waiting import DEADLINE_S, until
from zerolab.client.http import Client
from zerolab.contract.wire import RunExit
from zerolab.core.preemption import DirectivePoller


def test_without_a_server_nobody_asks_to_leave(tmp_path: Path) -> None:
    poller = DirectivePoller(make_spec(tmp_path))
    assert not poller.should_preempt
    assert not poller.stop_requested
    assert poller.seconds_left is None
    poller.close()


def test_a_server_that_is_away_preempts_nobody(tmp_path: Path) -> None:
    poller = DirectivePoller(make_spec(tmp_path, master=closed_port()))
    assert not poller.should_preempt
    assert not poller.stale.is_set()
    poller.close()


class Stranger(http.server.BaseHTTPRequestHandler):
    """Another program that listens where the server did."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"Welcome!")


def test_what_is_no_answer_of_a_server_is_told_once_and_preempts_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    asked = threading.Semaphore(0)

    class Counted(Stranger):
        def log_message(self, *_: object) -> None:
            asked.release()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counted) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        poller = DirectivePoller(
            make_spec(tmp_path, master=f"http://127.0.0.1:{stranger.server_port}")
        )
        for _ in range(3):
            assert asked.acquire(timeout=DEADLINE_S)
        poller.close()
        stranger.shutdown()
    assert caplog.text.count("cannot be asked whether to pause or to stop") == 1
    assert not poller.should_preempt


@pytest.mark.processes
def test_pausing_preempts_and_canceling_stops(
    server: KillableServer, client: Client, tmp_path: Path
) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    poller = DirectivePoller(spec)
    assert not poller.should_preempt
    client.experiment_action(spec.experiment_id, "pause")
    until("the run is asked to leave", lambda: poller.should_preempt)
    assert poller.directive.action == "preempt"
    assert not poller.stop_requested
    assert poller.seconds_left is not None
    assert 0 < poller.seconds_left <= spec.config["preemption_timeout"]
    client.experiment_action(spec.experiment_id, "cancel")
    until("the trial is told to stop", lambda: poller.stop_requested)
    assert not poller.stale.is_set()
    poller.close()


@pytest.mark.processes
def test_a_run_that_another_one_has_replaced_is_stale(
    server: KillableServer, client: Client, tmp_path: Path
) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    poller = DirectivePoller(spec)
    client.run_exited(spec.run_id, RunExit(-9))
    until("the run knows", poller.stale.is_set)
    assert poller.should_preempt
    poller.close()
