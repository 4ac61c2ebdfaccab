"""Deferred operations of searchers are computed outside of the writer thread."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.helpers import Server, serve
from tests.waiting import until
from zerolab.searcher import Deferred, Operation
from zerolab.searcher.predefined import FixedTrialsSearcher

SPACE = {"deepspeed_config": "ds_config.json", "lr": {"type": "double", "minval": 0, "maxval": 1}}
RANDOM = {
    "name": "random", "metric": "loss", "max_length": 10, "max_trials": 3,
    "max_concurrent_trials": 1,
}  # fmt: skip


class Gate(msgspec.Struct):
    """Holds deferred operations until it is opened."""

    opened: threading.Event = msgspec.field(default_factory=threading.Event)
    threads: list[str] = []
    error: str = ""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Defer the creation of trials."""
    gate = Gate()
    gate.opened.set()
    create: Callable[..., Operation] = FixedTrialsSearcher._create

    def compute(searcher: FixedTrialsSearcher, trial_id: int) -> list[Operation]:
        gate.threads.append(threading.current_thread().name)
        assert gate.opened.wait(60)
        if gate.error:
            raise ValueError(gate.error)
        return [create(searcher, trial_id)]

    def defer(searcher: FixedTrialsSearcher, trial_id: int) -> Operation:
        return Deferred(lambda: compute(searcher, trial_id))

    monkeypatch.setattr(FixedTrialsSearcher, "_create", defer)
    yield gate
    gate.opened.set()


def end_trial(server: Server) -> None:
    (item,) = server.work()
    server.post(f"/runs/{item.run_id}/started", {})
    server.exit(item.run_id, 0)


def hparams(server: Server) -> list[Any]:
    return [trial["hparams"] for trial in server.trials()]


def test_server_responds_while_a_trial_is_computed(tmp_path: Path, gate: Gate) -> None:
    with serve(tmp_path) as server:
        server.submit(searcher=RANDOM, hyperparameters=SPACE)
        server.add_agent(slots=1)
        gate.opened.clear()
        gate.threads.clear()
        end_trial(server)
        until("it is computed", lambda: gate.threads)
        server.act("pause")
        server.act("activate")
        assert len(server.trials()) == 1
        assert server.sql("SELECT creating FROM experiments") == [(1,)]
        gate.opened.set()
        until("it is created", lambda: len(server.trials()) == 2)
        end_trial(server)
        until("the last one is created", lambda: len(server.trials()) == 3)
        end_trial(server)
        assert server.experiment()["state"] == "COMPLETED"
        assert len(gate.threads) == 2
        assert not [name for name in gate.threads if "writer" in name]


def test_restart_computes_deferred_operations_again(tmp_path: Path, gate: Gate) -> None:
    with serve(tmp_path) as server:
        server.submit(searcher=RANDOM, hyperparameters=SPACE)
        server.add_agent(slots=1)
        gate.opened.clear()
        end_trial(server)
        until("it is computed", lambda: len(gate.threads) == 2)
        threading.Timer(0.2, gate.opened.set).start()  # the server waits for its threads
    with serve(tmp_path) as server:
        until("it is created", lambda: len(server.trials()) == 2)
        assert server.experiment()["state"] == "ACTIVE"
        first, second = hparams(server)
        assert first != second


def test_failed_searcher_ends_its_experiment(tmp_path: Path, gate: Gate) -> None:
    with serve(tmp_path) as server:
        server.submit(searcher=RANDOM, hyperparameters=SPACE)
        server.add_agent(slots=1)
        gate.error = "no such kernel"
        end_trial(server)
        until("it has failed", server.experiment, lambda row: row["state"] == "ERROR")
        error = server.experiment()["error"]
        assert error == "its searcher failed: ValueError: no such kernel"
        assert server.services.orchestrator.searches.backlog == {}
