from pathlib import Path

import pytest

from tests.client.helpers import closed_port, make_spec
from tests.faults.helpers import KillableServer, make_runs
from tests.waiting import until
from zerolab.client.http import Client
from zerolab.contract.wire import RunExit
from zerolab.core.preempt import DirectivePoller


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
