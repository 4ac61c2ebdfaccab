"""Changes of large searches: replayed outside of the writer, deleted a part at a time."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, serve, validation
from zerolab.contract.spec import EXIT_PREEMPTED
from zeroserver.orchestrator import searching, user_actions
from zeroserver.orchestrator.state import World
from zeroserver.store.database import Transaction

SPACE = {"deepspeed_config": "ds_config.json", "lr": {"type": "double", "minval": 0, "maxval": 1}}
RANDOM = {
    "name": "random", "metric": "loss", "max_length": 10, "max_trials": 6,
    "max_concurrent_trials": 6,
}  # fmt: skip
HALVING = {
    "name": "async_halving", "metric": "loss", "max_length": 16, "max_trials": 6,
    "max_concurrent_trials": 6, "num_rungs": 2,
}  # fmt: skip


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that have replayed a search."""
    threads: list[str] = []
    fold = searching._fold

    def noted(*arguments: Any) -> searching.Replay:
        threads.append(threading.current_thread().name)
        return fold(*arguments)

    monkeypatch.setattr(searching, "_fold", noted)
    return threads


def validated(server: Server) -> None:
    server.add_agent(slots=6)
    for number, item in enumerate(server.work()):
        server.post(f"/runs/{item.run_id}/started", {})
        server.report(item.run_id, validation(4, number / 10), checkpoint(4, str(number)))


def end(server: Server) -> None:
    server.act("cancel")
    for item in server.work():
        server.exit(item.run_id, EXIT_PREEMPTED)
    assert server.experiment()["state"] == "CANCELED"


def go_on(server: Server, **searcher: Any) -> None:
    server.post("/experiments/1/continue", {"config": {"searcher": searcher}})
    assert server.experiment()["state"] == "ACTIVE"


def trial_in(server: Server, state: str) -> int:
    return next(int(trial["id"]) for trial in server.trials() if trial["state"] == state)


def grow_twice(server: Server) -> None:
    go_on(server, max_trials=8)
    end(server)
    go_on(server, max_trials=9)


def continue_trial(server: Server) -> None:
    go_on(server, max_trials=8)
    end(server)
    server.post(f"/trials/{trial_in(server, 'CANCELED')}/continue")


def activate(server: Server) -> None:
    go_on(server)
    server.act("pause")
    server.services.world.searchers.clear()
    server.act("activate")


def view(server: Server) -> None:
    go_on(server)
    server.services.world.searchers.clear()
    assert server.get("/experiments/1/searcher")["searcher"]["problem"] is None


def kill_trial(server: Server) -> None:
    go_on(server)
    server.services.world.searchers.clear()
    server.post(f"/trials/{trial_in(server, 'QUEUED')}/kill")


@pytest.mark.parametrize(
    ("change", "searcher"),
    [
        (go_on, RANDOM),
        (go_on, HALVING),
        (grow_twice, HALVING),
        (continue_trial, HALVING),
        (activate, HALVING),
        (view, HALVING),
        (kill_trial, HALVING),
    ],
)
def test_writer_replays_no_search(
    sqlite_server: Server,
    replaying: list[str],
    searcher: dict[str, Any],
    change: Callable[[Server], None],
) -> None:
    server = sqlite_server
    server.submit(hyperparameters=SPACE, searcher=searcher)
    validated(server)
    end(server)
    change(server)
    assert replaying
    assert "writer" not in replaying


def test_start_loads_large_searches(
    tmp_path: Path, replaying: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "_LARGE", 6)
    with serve(tmp_path) as server:
        server.submit(hyperparameters=SPACE, searcher=HALVING)
        server.submit(hyperparameters=SPACE, searcher={**HALVING, "max_trials": 5})
    with serve(tmp_path) as server:
        assert [*server.services.world.searchers] == [1]
        validated(server)
    assert replaying.count("writer") <= 1  # of the small one


def test_growth_is_that_of_a_replay(sqlite_server: Server) -> None:
    """The searcher in memory and one that is rebuilt from the log make the same trials."""
    server = sqlite_server
    server.submit(hyperparameters=SPACE, searcher=HALVING, reproducibility={"experiment_seed": 7})
    validated(server)
    end(server)
    grow_twice(server)

    def replayed(world: World, transaction: Transaction) -> list[Any]:
        operations = searching.replay(world, transaction, 1)
        return [each for each in operations if isinstance(each, searching.Create)]

    wanted = server.write(replayed)
    rows = server.sql("SELECT request_id, seed FROM trials ORDER BY id")
    assert rows == [(each.trial_id, each.trial_seed) for each in wanted]
    assert len(rows) == 9


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change deletes very little."""
    monkeypatch.setattr(user_actions, "_CHECKPOINTS_AT_ONCE", 2)
    monkeypatch.setattr(user_actions, "_TRIALS_AT_ONCE", 2)
    monkeypatch.setattr(user_actions, "_EVENTS_AT_ONCE", 5)


TABLES = ("experiments", "trials", "runs", "checkpoints", "searcher_events", "points", "logs")


def count(server: Server, table: str) -> int:
    ((number,),) = server.sql(f"SELECT count(*) FROM {table}")
    return int(number)


def test_delete_in_parts(server: Server, small_parts: None) -> None:
    server.submit(hyperparameters=SPACE, searcher=HALVING)
    validated(server)
    end(server)
    before = server.services.database.jobs
    server.request("DELETE", "/experiments/1")
    assert server.services.database.jobs - before >= 6
    assert [count(server, table) for table in TABLES] == [0] * len(TABLES)
    assert server.services.world.deleting == set()


def test_interrupted_delete_is_repeated(server: Server, small_parts: None) -> None:
    server.submit(hyperparameters=SPACE, searcher=HALVING)
    validated(server)
    end(server)
    trials = count(server, "trials")
    while count(server, "trials") == trials:
        assert not server.write(
            lambda world, transaction: user_actions.remove(world, transaction, 1)
        )
    experiment = server.experiment()
    assert experiment["num_trials"] == count(server, "trials")
    states = [trial["state"] for trial in server.trials()]
    assert experiment["canceled_trials"] == states.count("CANCELED")
    answer = server.http.post("/api/v1/experiments/1/continue", json={})
    assert answer.status_code == 409
    assert "is being deleted" in answer.json()["error"]["message"]
    assert server.http.post("/api/v1/trials/6/continue").status_code == 409
    server.request("DELETE", "/experiments/1")
    assert [count(server, table) for table in TABLES] == [0] * len(TABLES)


def test_delete_trial_with_many_checkpoints(server: Server, small_parts: None) -> None:
    server.submit(searcher={**RANDOM, "max_trials": 1}, checkpoint_storage={"save_trial_latest": 9})
    server.add_agent()
    run_id = server.begin().run_id
    server.report(run_id, *(checkpoint(step) for step in range(1, 6)))
    end(server)
    server.request("DELETE", "/trials/1")
    assert (count(server, "trials"), count(server, "checkpoints")) == (0, 0)
    assert server.experiment()["num_trials"] == 0
