"""Searches of thousands of trials are created in several transactions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import Server, serve
from tests.waiting import until
from zerolab.searcher import Continue, Create, Operation, Shutdown, Stop
from zeroserver.extensions.custom_search.service import Answered, CustomSearchService
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services

TRIALS = 2500
SPACE = {"deepspeed_config": "ds_config.json", "lr": {"type": "double", "minval": 0, "maxval": 1}}
RANDOM = {
    "name": "random", "metric": "loss", "max_length": 10,
    "max_trials": TRIALS, "max_concurrent_trials": TRIALS,
}  # fmt: skip
CUSTOM = {"name": "custom", "metric": "loss", "max_length": 10}


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the server stop after the first transaction of a search's operations."""

    async def no_effects(_services: Services) -> None:
        pass

    monkeypatch.setattr(Services, "execute_operations", no_effects)
    yield
    monkeypatch.undo()


def numbers(server: Server) -> list[int]:
    rows = server.sql("SELECT request_id FROM trials ORDER BY id")
    return [number for (number,) in rows]


def test_submit_creates_trials_in_parts(server: Server) -> None:
    before = server.services.database.jobs
    experiment = server.submit(searcher=RANDOM, hyperparameters=SPACE)
    assert experiment["num_trials"] == TRIALS
    assert server.services.database.jobs - before >= 4
    assert numbers(server) == [*range(1, TRIALS + 1)]
    assert server.sql("SELECT creating FROM experiments") == [(0,)]
    assert server.services.orchestrator.searches.backlog == {}


def test_restart_creates_missing_trials(
    tmp_path: Path, interrupted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path) as server:
        assert server.submit(searcher=RANDOM, hyperparameters=SPACE)["num_trials"] < TRIALS
        first = server.sql("SELECT request_id, hparams FROM trials ORDER BY id")
    monkeypatch.undo()
    with serve(tmp_path) as server:
        until("all are created", server.experiment, lambda row: row["num_trials"] == TRIALS)
        assert numbers(server) == [*range(1, TRIALS + 1)]
        assert (
            server.sql("SELECT request_id, hparams FROM trials ORDER BY id")[: len(first)] == first
        )
        assert server.sql("SELECT creating FROM experiments") == [(0,)]


def test_reports_are_accepted_while_trials_are_created(
    sqlite_server: Server, interrupted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = sqlite_server
    searcher = {**RANDOM, "max_trials": TRIALS + 1}
    created = server.submit(searcher=searcher, hyperparameters=SPACE)["num_trials"]
    server.add_agent()
    run_id = server.begin().run_id
    server.exit(run_id, 0)
    assert server.trial()["state"] == "COMPLETED"
    assert (
        server.experiment()["num_trials"] == created
    )  # the next operation is queued behind the others
    monkeypatch.undo()
    assert server.http.portal is not None
    server.http.portal.call(server.services.execute_operations)
    assert numbers(server) == [*range(1, TRIALS + 2)]


def test_kill_during_creation_ends_search(
    sqlite_server: Server, interrupted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = sqlite_server
    created = server.submit(searcher=RANDOM, hyperparameters=SPACE)["num_trials"]
    assert server.act("kill")["state"] == "CANCELED"
    monkeypatch.undo()
    assert server.http.portal is not None
    server.http.portal.call(server.services.execute_operations)
    assert len(numbers(server)) == created
    assert server.services.orchestrator.searches.backlog == {}


@pytest.mark.parametrize("follows", [Stop(9000), Continue(9000, 5)])
def test_operations_on_trial_not_yet_created(
    sqlite_server: Server,
    interrupted: None,
    monkeypatch: pytest.MonkeyPatch,
    follows: Operation,
) -> None:
    """A searcher creates a trial and stops it at once, while others are still to be created."""
    server = sqlite_server
    server.submit(searcher=RANDOM, hyperparameters=SPACE)
    operations = [Create(9000, {"lr": 0.5}, 0), follows]
    server.write(lambda work: work.operations.execute(1, operations))
    monkeypatch.undo()
    assert server.http.portal is not None
    server.http.portal.call(server.services.execute_operations)
    rows = server.sql("SELECT state, stop, until FROM trials WHERE request_id = 9000")
    stops = isinstance(follows, Stop)
    assert rows == [("COMPLETED", "searcher", None) if stops else ("QUEUED", None, 5)]
    events = server.sql("SELECT kind, reason FROM searcher_events WHERE request_id = 9000")
    assert events == [("created", None), *([("exited", None)] if stops else [])]


def create(number: int, **more: Any) -> dict[str, Any]:
    hparams = {"deepspeed_config": "ds_config.json", "lr": number / TRIALS}
    return {"kind": "create", "trial_id": number, "hparams": hparams, **more}


def send(server: Server, after: int, operations: list[dict[str, Any]]) -> Any:
    body = {"after": after, "handled": max(after, 0), "operations": operations}
    return server.http.post("/api/v1/experiments/1/searcher/operations", json=body)


def test_custom_operations_run_in_parts(server: Server) -> None:
    server.submit(searcher=CUSTOM)
    before = server.services.database.jobs
    operations = [create(number) for number in range(1, TRIALS + 1)]
    assert send(server, -1, operations).json() == {"handled": 0}
    assert server.services.database.jobs - before >= 4
    assert send(server, -1, operations).json() == {"handled": 0}
    assert numbers(server) == [*range(1, TRIALS + 1)]
    assert server.experiment()["num_trials"] == TRIALS


def test_interrupted_custom_operations_are_sent_again(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(searcher=CUSTOM)
    operations = [create(number) for number in range(1, TRIALS + 1)]
    answered = Answered(-1, 0, [Create(row["trial_id"], row["hparams"], 0) for row in operations])
    handled, start = server.write(
        lambda work: CustomSearchService(work).take_operations(1, answered)
    )
    assert handled == -1
    assert start is not None
    assert 0 < start < TRIALS
    changed = [{**create(1), "hparams": {"lr": 7}}, *operations[1:]]
    refused = send(server, -1, changed)
    assert refused.status_code == 422
    assert "operations[0].trial_id: must be a number that no trial has, got 1" in refused.text
    assert send(server, -1, operations).json() == {"handled": 0}
    assert numbers(server) == [*range(1, TRIALS + 1)]
    assert send(server, 0, [create(1)]).status_code == 422


class Stopping:
    """Searcher that replaces some ended trials, and shuts down after the last."""

    def __init__(self, last: int) -> None:
        self.left = last

    def initial_operations(self) -> list[Operation]:
        return []

    def trial_created(self, trial_id: int) -> list[Operation]:
        return []

    def validation_completed(self, trial_id: int, metric: float, length: float) -> list[Operation]:
        return []

    def trial_exited(self, trial_id: int) -> list[Operation]:
        self.left -= 1
        if self.left == 0:
            return [Shutdown()]
        if trial_id <= 3:
            self.left += 1
            return [Create(5000 + trial_id, {"lr": 0.5}, 0), Stop(5000 + trial_id)]
        return []

    def trial_exited_early(self, trial_id: int, reason: str) -> list[Operation]:
        return self.trial_exited(trial_id)

    def progress(self) -> float:
        return 0.0


@pytest.mark.parametrize("shutdown_first", [False, True])
def test_many_creates_and_stops_and_shutdown(sqlite_server: Server, shutdown_first: bool) -> None:
    server, count = sqlite_server, 1000
    server.submit(searcher={**RANDOM, "max_trials": 1}, hyperparameters=SPACE)
    operations: list[Operation] = [Create(n, {"lr": 0.5}, 0) for n in range(2, count + 1)]
    operations += [Stop(n) for n in range(1, count + 1)]
    operations += [Shutdown()] if shutdown_first else []
    searcher = Stopping(count)

    def begin(work: UnitOfWork) -> None:
        work.orchestrator.searches.searchers[1] = searcher
        work.operations.execute(1, operations)

    before = server.services.database.jobs
    server.write(begin)
    assert server.http.portal is not None
    server.http.portal.call(server.services.execute_operations)
    assert server.services.orchestrator.searches.backlog == {}
    assert len(numbers(server)) == count + 3
    assert server.experiment()["state"] == "COMPLETED"
    assert server.sql("SELECT searcher_done, num_trials FROM experiments") == [(1, count + 3)]
    assert server.services.database.jobs - before >= 30


def test_restart_completes_pending_operations(
    tmp_path: Path, interrupted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    searcher = {
        "name": "tpe_asha", "metric": "loss", "max_length": 100, "max_trials": 40,
        "max_concurrent_trials": 20,
    }  # fmt: skip
    monkeypatch.setattr("zeroserver.orchestrator.search.operation_service._BUDGET_MS", 0.05)
    with serve(tmp_path) as server:
        server.submit(searcher=searcher, hyperparameters=SPACE)
        assert server.sql("SELECT request_id, until FROM trials") == [(1, None)]
    monkeypatch.undo()
    with serve(tmp_path) as server:
        until("all are created", server.experiment, lambda row: row["num_trials"] == 20)
        assert server.sql("SELECT count(*) FROM trials WHERE until IS NULL") == [(0,)]
