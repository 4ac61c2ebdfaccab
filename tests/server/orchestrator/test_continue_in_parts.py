"""Continuation of an experiment with more trials than one change reopens."""

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.helpers import (
    Server,
    checkpoint,
    experiment_config,
    model_archive,
    training,
    validation,
)
from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, until
from zerolab.contract.spec import EXIT_PREEMPTED
from zerolab.errors import ConflictError
from zeroserver.extensions.continued_experiments import service
from zeroserver.extensions.continued_experiments.service import ExperimentContinuation
from zeroserver.orchestrator import lifecycle

SPACE = {"deepspeed_config": "ds_config.json", "lr": {"type": "double", "minval": 0, "maxval": 1}}
RANDOM = {
    "name": "random", "metric": "loss", "max_length": 10, "max_trials": 7,
    "max_concurrent_trials": 7,
}  # fmt: skip
CONTINUE = "/api/v1/experiments/1/continue"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one change reopen two trials, and queue two."""
    monkeypatch.setattr(service, "_REOPENED_AT_ONCE", 2)
    monkeypatch.setattr(lifecycle, "_IDLE_AT_ONCE", 2)


def states(server: Server) -> Counter[str]:
    return Counter(state for (state,) in server.sql("SELECT state FROM trials"))


def end(server: Server) -> None:
    """Submit seven trials, complete the first, save a checkpoint of the second, cancel all."""
    server.submit(hyperparameters=SPACE, searcher=RANDOM)
    server.add_agent(slots=2)
    first, second = server.begin(1), server.begin(2)
    server.report(first.run_id, training(10, 1.0), validation(10, 0.1), checkpoint(10, "1"))
    server.report(second.run_id, training(5, 1.0), checkpoint(5, "2"))
    server.exit(first.run_id, 0)
    server.act("cancel")
    for item in server.work():
        server.exit(item.run_id, EXIT_PREEMPTED)
    assert states(server) == {"COMPLETED": 1, "CANCELED": 6}


def resume(server: Server, **changes: Any) -> httpx.Response:
    return server.http.post(CONTINUE, json=changes)


def interrupt(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a continuation before its last change."""

    def fail(*_arguments: Any) -> None:
        raise ConflictError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(ExperimentContinuation, "continue_experiment", fail)
        assert resume(server).status_code == 409


@pytest.mark.parametrize("activate", [True, False])
def test_continue_in_parts(server: Server, activate: bool) -> None:
    end(server)
    before = server.services.database.jobs
    response = resume(server, activate=activate)
    assert response.is_success, response.text
    assert server.services.database.jobs - before >= 4
    experiment = server.experiment()
    assert experiment["state"] == ("ACTIVE" if activate else "PAUSED")
    assert (experiment["canceled_trials"], experiment["ended_at"]) == (0, None)
    assert experiment["progress"] == pytest.approx(1 / 7)
    assert not server.services.orchestrator.queue.unapplied
    if activate:
        assert len(server.work()) == 2
        assert states(server) == {"COMPLETED": 1, "QUEUED": 6}
        assert server.begin(2).latest_checkpoint is not None
    else:
        assert server.work() == []
        assert states(server) == {"COMPLETED": 1, "PAUSED": 6}


def test_continue_in_parts_trains_to_end(server: Server) -> None:
    end(server)
    assert resume(server, config={"searcher": {"max_trials": 8}}).is_success
    while server.experiment()["state"] == "ACTIVE":
        server.exit(server.work()[0].run_id, 0)
    assert server.experiment()["state"] == "COMPLETED"
    assert states(server) == {"COMPLETED": 8}
    repeated = "GROUP BY kind, request_id HAVING count(*) > 1"
    assert not server.sql(f"SELECT kind, request_id FROM searcher_events {repeated}")


def test_interrupted_continue_is_repeated(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    end(server)
    interrupt(server, monkeypatch)
    experiment = server.experiment()
    assert (experiment["state"], experiment["canceled_trials"]) == ("CANCELED", 0)
    assert states(server) == {"COMPLETED": 1, "PAUSED": 6}
    server.tick()
    assert server.work() == []
    refused = server.http.post("/api/v1/trials/2/activate")
    assert refused.status_code == 409
    server.post("/trials/3/kill")
    refused = server.http.post("/api/v1/trials/3/continue")
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == (
        "experiment 1: is being continued; if that was interrupted, run "
        "`zerolab experiment continue 1` again"
    )
    assert resume(server).is_success
    assert states(server) == {"COMPLETED": 1, "QUEUED": 6}
    assert len(server.work()) == 2


def test_interrupted_continue_is_deleted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    end(server)
    interrupt(server, monkeypatch)
    server.request("DELETE", "/experiments/1")
    assert states(server) == {}


def test_refused_continue_reopens_nothing(server: Server) -> None:
    end(server)
    refused = resume(server, config={"reproducibility": {"experiment_seed": 3}})
    assert refused.status_code == 422
    assert states(server) == {"COMPLETED": 1, "CANCELED": 6}


def test_continue_with_lost_checkpoint_reopens_nothing(server: Server) -> None:
    searcher = {**RANDOM, "max_trials": 3, "max_concurrent_trials": 3}
    server.submit(hyperparameters=SPACE, searcher=searcher)
    server.add_agent(slots=3)
    for item in server.work():
        server.post(f"/runs/{item.run_id}/started", {})
        server.report(item.run_id, training(10, 1.0), validation(10, 0.1))
        server.exit(item.run_id, 0)
    assert states(server) == {"COMPLETED": 3}
    refused = resume(server, config={"searcher": {"max_length": {"batches": 20}}})
    assert refused.status_code == 409
    assert "has no checkpoint to continue" in refused.json()["error"]["message"]
    assert states(server) == {"COMPLETED": 3}


DIES_BETWEEN_PARTS = """
import os, signal, sys
import zeroserver.process
from zeroserver.extensions.continued_experiments import service

def die(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)

service._REOPENED_AT_ONCE = 2
service.ExperimentContinuation.continue_experiment = die
sys.exit(zeroserver.process.main())
"""


@pytest.mark.processes
def test_killed_server_repeats_continue(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "home")
    server._program = ["-c", DIES_BETWEEN_PARTS]
    server.start()
    try:
        client = server.client()
        config = experiment_config(hyperparameters=SPACE, searcher=RANDOM)
        client.create_experiment(config, model_archive(tmp_path / "model"))
        client.experiment_action(1, "kill")
        with pytest.raises(httpx.TransportError):
            httpx.post(
                f"{server.url}{CONTINUE}",
                headers={"Authorization": f"Bearer {server.token}"},
                json={},
                timeout=DEADLINE_S,
            )
        server.kill()
        server._program = []
        server.start()
        client = server.client()
        counts = Counter(trial["state"] for trial in client.trials(1))
        assert counts == {"PAUSED": 7}
        assert client.experiment(1)["state"] == "CANCELED"
        assert client.experiment_action(1, "continue")["state"] == "ACTIVE"
        until(
            "all trials are queued",
            lambda: Counter(trial["state"] for trial in client.trials(1)),
            lambda counts: counts == {"QUEUED": 7},
        )
    finally:
        server.close()
