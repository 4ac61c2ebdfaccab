import http.server
import logging
import threading
from pathlib import Path

import pytest

from tests.client.helpers import closed_port, make_spec
from tests.faults.helpers import KillableServer, make_runs
from tests.waiting import DEADLINE_S, until
from zerolab.client.http import Client
from zerolab.contract.messages import RunExit
from zerolab.core.preemption import DirectivePoller


def test_standalone_run_is_never_preempted(tmp_path: Path) -> None:
    poller = DirectivePoller(make_spec(tmp_path))
    assert not poller.should_preempt
    assert not poller.stop_requested
    assert poller.seconds_left is None
    poller.close()


def test_unreachable_server_does_not_preempt(tmp_path: Path) -> None:
    poller = DirectivePoller(make_spec(tmp_path, master=closed_port()))
    assert not poller.should_preempt
    assert not poller.stale.is_set()
    poller.close()


class OtherProgram(http.server.BaseHTTPRequestHandler):
    """Another program that listens on the server's port."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"Welcome!")


def test_invalid_response_warns_once_without_preempting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    polled = threading.Semaphore(0)

    class CountingProgram(OtherProgram):
        def log_message(self, *_: object) -> None:
            polled.release()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), CountingProgram) as program:
        threading.Thread(target=program.serve_forever, daemon=True).start()
        poller = DirectivePoller(
            make_spec(tmp_path, master=f"http://127.0.0.1:{program.server_port}")
        )
        for _ in range(3):
            assert polled.acquire(timeout=DEADLINE_S)
        poller.close()
        program.shutdown()
    assert caplog.text.count("cannot poll the server for pause or stop") == 1
    assert not poller.should_preempt


@pytest.mark.processes
def test_pause_preempts_and_cancel_stops(
    server: KillableServer, client: Client, tmp_path: Path
) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    poller = DirectivePoller(spec)
    assert not poller.should_preempt
    client.experiment_action(spec.experiment_id, "pause")
    until("the run is preempted", lambda: poller.should_preempt)
    assert poller.directive.action == "preempt"
    assert not poller.stop_requested
    assert poller.seconds_left is not None
    assert 0 < poller.seconds_left <= spec.config["preemption_timeout"]
    client.experiment_action(spec.experiment_id, "cancel")
    until("the trial is stopped", lambda: poller.stop_requested)
    assert not poller.stale.is_set()
    poller.close()


@pytest.mark.processes
def test_superseded_run_is_stale(server: KillableServer, client: Client, tmp_path: Path) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    poller = DirectivePoller(spec)
    client.run_exited(spec.run_id, RunExit(-9))
    until("the run is stale", poller.stale.is_set)
    assert poller.should_preempt
    poller.close()
